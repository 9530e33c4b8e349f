"""A Perfetto trace parsed back: it is valid, and says of a lake what the lake says."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import defaultdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackDescriptor, TrackEvent

from capture.exports.perfetto import Summary, export_perfetto
from capture.exports.selection import ExportError, Selection, parse_time
from capture.frames import TraceWriter
from capture.lake import LakePlace, open_connection
from tests.capture.lakes import commit_rings, place_of
from tests.capture.rings import MIB, new_ring, write_finish, write_request, write_step
from tests.capture.stage import Clock

MS = 1_000_000
BEGIN, END = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END
INSTANT, COUNTER = TrackEvent.TYPE_INSTANT, TrackEvent.TYPE_COUNTER


class Slice(NamedTuple):
    track: str
    name: str
    begin_ns: int
    end_ns: int
    depth: int
    args: dict[str, Any]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


class Parsed:
    """A trace as a viewer reads it. Raises AssertionError when it is not valid."""

    def __init__(self, data: bytes) -> None:
        self.trace = Trace.FromString(data)
        self.tracks: dict[int, TrackDescriptor] = {}
        self.slices: list[Slice] = []
        self.instants: list[tuple[str, str, dict[str, Any]]] = []
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._keys: dict[int, str] = {}
        self._open: dict[int, list[tuple[str, int, dict[str, Any], TrackEvent]]] = {}
        self._now: dict[int, int] = {}
        for packet in self.trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            self._take(packet)
        assert not any(self._open.values()), "a slice never ends"
        self._check_tracks()
        self._check_flows()

    def name(self, uuid: int) -> str:
        """The track's name, after those above it."""
        track = self.tracks[uuid]
        own = track.name or track.process.process_name
        return f"{self.name(track.parent_uuid)}/{own}" if track.parent_uuid else own

    def on(self, end: str) -> list[Slice]:
        return [slice_ for slice_ in self.slices if slice_.track.endswith(end)]

    def _take(self, packet: Any) -> None:
        for entry in packet.interned_data.event_names:
            assert self._names.setdefault(entry.iid, entry.name) == entry.name
        for entry in packet.interned_data.debug_annotation_names:
            assert self._keys.setdefault(entry.iid, entry.name) == entry.name
        if packet.HasField("track_descriptor"):
            uuid = packet.track_descriptor.uuid
            assert uuid not in self.tracks, "two tracks have one uuid"
            self.tracks[uuid] = packet.track_descriptor
        if packet.HasField("track_event"):
            self._take_event(packet.timestamp, packet.track_event)

    def _take_event(self, at_ns: int, event: TrackEvent) -> None:
        uuid = event.track_uuid
        assert uuid in self.tracks, "an event comes before its track"
        assert at_ns >= self._now.get(uuid, 0), "time goes back on a track"
        self._now[uuid] = at_ns
        name = self._names[event.name_iid] if event.name_iid else event.name
        args = {self._keys[note.name_iid]: value(note) for note in event.debug_annotations}
        stack = self._open.setdefault(uuid, [])
        if event.type == BEGIN:
            stack.append((name, at_ns, args, event))
        elif event.type == END:
            name, begin_ns, args, begun = stack.pop()
            flows = tuple(begun.flow_ids), tuple(begun.terminating_flow_ids)
            track = self.name(uuid)
            self.slices.append(Slice(track, name, begin_ns, at_ns, len(stack), args, *flows))
        elif event.type == INSTANT:
            self.instants.append((self.name(uuid), name, args))
        else:
            assert event.type == COUNTER
            assert self.tracks[uuid].HasField("counter")
            self.counters[self.name(uuid)].append((at_ns, event.double_counter_value))

    def _check_tracks(self) -> None:
        pids = [track.process.pid for track in self.tracks.values() if track.HasField("process")]
        assert len(pids) == len(set(pids))
        for track in self.tracks.values():
            assert track.parent_uuid == 0 or track.parent_uuid in self.tracks
            assert track.name or track.process.process_name

    def _check_flows(self) -> None:
        started = {flow: slice_ for slice_ in self.slices for flow in slice_.starts}
        ended = {flow: slice_ for slice_ in self.slices for flow in slice_.ends}
        assert set(started) == set(ended)
        assert len(started) == sum(len(slice_.starts) for slice_ in self.slices)
        for flow, slice_ in started.items():
            assert slice_.begin_ns <= ended[flow].begin_ns


def value(note: Any) -> Any:
    return getattr(note, note.WhichOneof("value"))


def export(place: LakePlace, selection: Selection, **limits: int) -> tuple[Parsed, Summary]:
    stream = io.BytesIO()
    with open_connection(place) as lake:
        summary = export_perfetto(lake, selection, stream, **{"max_bytes": 100 * MIB, **limits})
    assert summary.size == len(stream.getvalue())
    return Parsed(stream.getvalue()), summary


def write_engine(home: Path, clock: Clock) -> list[str]:
    """Two requests over eight steps of 10 ms; step 4 is lost. Kernels, events, samples, a mark."""
    ring = new_ring(home / "rings")
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny", "fingerprint": "f00d"})
    now = clock.ns
    ids = [write_request(trace, slot, arrival_ns=now + slot * MS) for slot in range(2)]
    for step in range(8):
        start = now + (20 + 10 * step) * MS
        if step == 4:
            continue
        write_step(
            trace, step, 2, phase=int(step == 0), position=step, start_ns=start, latency_us=1e4
        )
        if step == 2:
            trace.kernels(
                step_id=step,
                names=["attention", "matmul"],
                start_ns=np.array([start + MS, start + 2 * MS]),
                layer=np.array([0, 0]),
                kernel=np.array([0, 1]),
                duration_us=np.array([500.0, 700.0]),
            )
    clock.ns = now + 50 * MS
    trace.event(kind="preempted", request_id=bytes.fromhex(ids[0]), slot=0, detail="no blocks")
    trace.event(kind="gc_pause", request_id=None, slot=None, detail="gen 2", duration_ns=2 * MS)
    values = [50.0, 40.0, 30.0, 1e9, 300.0, 60.0, 1800.0, 2600.0, 1.0]
    trace.gpu(index=0, values=values, unavailable="")
    trace.mark("deploy 42")
    times = {
        "admitted": 15,
        "first_token": 23,
        "last_token": 93,
        "detokenized": 94,
        "serialized": 95,
        "flushed": 99,
    }
    clock.ns = now + 98 * MS
    for slot in range(2):
        ended = {f"{name}_ns": now + at * MS for name, at in times.items()}
        write_finish(trace, slot, output_tokens=8, **ended)
    ring.close()
    return ids


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> tuple[LakePlace, list[str]]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("capture.ring.time", clock)
        ids = write_engine(home, clock)
    return commit_rings(home), ids


def test_a_request_s_track_shows_its_phases_and_tokens(
    lake: tuple[LakePlace, list[str]],
) -> None:
    place, ids = lake
    parsed, summary = export(place, Selection())
    assert summary.cut_at is None
    assert summary.written == {"requests": 2, "tokens": 14, "steps": 7, "kernels": 2}
    slices = parsed.on(f"/requests/{ids[0][:8]} acme chat")
    assert [slice_.name for slice_ in slices if slice_.depth == 1] == [
        "queued",
        "prefill",
        "decode",
        "sending",
    ]
    (whole,) = (slice_ for slice_ in slices if slice_.depth == 0)
    assert whole.args["request_id"] == ids[0]
    assert whole.args["outcome"] == "stop"
    assert whole.end_ns - whole.begin_ns == pytest.approx(99 * MS, abs=2000)
    tokens = [slice_ for slice_ in slices if slice_.depth == 2]
    assert [token.name for token in tokens] == [f"token {n}" for n in (0, 1, 2, 3, 5, 6, 7)]
    assert set(tokens[1].args) == {
        "position",
        "token_id",
        "latency_us",
        "logprob",
        "margin",
        "step_id",
        "kv_blocks",
    }
    assert tokens[1].end_ns - tokens[1].begin_ns == pytest.approx(10 * MS, abs=5000)


def test_arrows_lead_from_a_token_to_its_step_and_on_to_its_kernels(
    lake: tuple[LakePlace, list[str]],
) -> None:
    parsed, _ = export(lake[0], Selection())
    steps = [slice_ for slice_ in parsed.on("/steps") if slice_.depth == 0]
    parts = [slice_.name for slice_ in parsed.on("/steps") if slice_.depth == 1]
    assert parts == ["schedule", "prepare", "forward", "sample"] * 7
    by_flow = {flow: step for step in steps for flow in step.ends}
    tokens = [slice_ for slice_ in parsed.slices if slice_.name.startswith("token ")]
    assert len(tokens) == 14
    for token in tokens:
        assert by_flow[token.starts[0]].args["step_id"] == token.args["step_id"]
    (step,) = (step for step in steps if step.args["step_id"] == 2)
    kernels = parsed.on("/kernels")
    assert [kernel.name for kernel in kernels] == ["attention", "matmul"]
    assert kernels[0].ends == step.starts
    assert len(step.starts) == 1


def test_counters_events_marks_pauses_and_losses_are_there(
    lake: tuple[LakePlace, list[str]],
) -> None:
    parsed, _ = export(lake[0], Selection())
    counters = {name.rpartition("/")[2]: values for name, values in parsed.counters.items()}
    assert counters["requests running"][0][1] == 2
    assert counters["GPU 0 power"][0][1] == 300
    assert counters["KV blocks used"] == counters["KV blocks used"][:1], "only when it changes"
    told = {name: args for _, name, args in parsed.instants}
    assert told["preempted"]["detail"] == "no blocks"
    assert "mark: deploy 42" in told
    assert told["exported by inferloop"]["tokens chosen"] == 14
    (pause,) = (slice_ for slice_ in parsed.slices if slice_.name == "gc_pause")
    assert pause.end_ns - pause.begin_ns == 2 * MS
    (gap,) = parsed.on("/losses")
    assert (gap.name, gap.args["steps"]) == ("steps missing", 1)


def test_what_the_ring_overwrote_is_a_slice_that_says_how_much(tmp_path: Path) -> None:
    with open_connection(place_of(tmp_path), read_only=False) as writer:
        fill(writer, steps=20, batch=4)
        writer.execute("DELETE FROM steps WHERE step_id BETWEEN 7 AND 9")
        writer.execute("DELETE FROM tokens WHERE step_id BETWEEN 7 AND 9")
        writer.execute(
            "INSERT INTO losses SELECT engine_id, 1, TIMESTAMP '2026-01-01 01:00:00', kind, 5, 3, "
            "n, NULL FROM engines, (VALUES ('overwritten', 12), ('torn', 4)) AS v(kind, n)"
        )
    parsed, _ = export(place_of(tmp_path), Selection())
    (lost,) = parsed.on("/losses")
    assert (lost.name, lost.args["kind"]) == ("trace lost 12 tokens", "overwritten")
    assert lost.end_ns - lost.begin_ns > 30 * MS


def test_a_selection_takes_its_requests_only(lake: tuple[LakePlace, list[str]]) -> None:
    place, ids = lake
    _, one = export(place, Selection(request_ids=(ids[1].upper(),)))
    assert (one.written["requests"], one.written["tokens"]) == (1, 7)
    for other in (f"chatcmpl-{ids[1]}", ids[1][:8], f"00-{ids[1]}-00f067aa0ba902b7-01"):
        _, same = export(place, Selection(request_ids=(other,)))
        assert same.written == one.written, other
    parsed, _ = export(place, Selection(slowest=1))
    assert sum("/requests/" in slice_.track for slice_ in parsed.slices if not slice_.depth) == 1
    with pytest.raises(ExportError, match="holds no request cmpl-00ff00ff"):
        export(place, Selection(request_ids=(ids[1], "cmpl-00ff00ff")))
    with pytest.raises(ExportError, match="'00ff' is no request id"):
        export(place, Selection(request_ids=("00ff",)))
    early = datetime(2020, 1, 1)
    with pytest.raises(ExportError, match="window is empty"):
        export(place, Selection(start=early, end=early))
    with pytest.raises(ExportError, match="no request was at work from 2020-01-01"):
        export(place, Selection(start=early, end=early + timedelta(days=1)))


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert parse_time("2026-11-29T14:00:00") == datetime(2026, 11, 29, 14)
    assert parse_time("2026-11-29T14:00+02:00") == datetime(2026, 11, 29, 12)
    with pytest.raises(ExportError, match="'yesterday' is no time"):
        parse_time("yesterday")


def fill(writer: duckdb.DuckDBPyConnection, *, steps: int, batch: int) -> None:
    """One engine that ran `steps` steps of 10 ms with `batch` requests from start to end."""
    engine = "'11111111-1111-1111-1111-111111111111'::UUID"
    at = "TIMESTAMP '2026-01-01 00:00:00' + INTERVAL 10 MILLISECOND * s"
    after = f"{at} + INTERVAL 9 MILLISECOND"
    writer.execute(
        f"INSERT INTO engines VALUES ({engine}, 1, 'host', 7, now()::TIMESTAMP, 'f', 'm', NULL)"
    )
    writer.execute(
        f"INSERT INTO steps SELECT {engine}, s, {at}, 100, 100, 8700, 100, NULL, 0, {batch}, "
        f"{batch}, 0, s % 50, 100, 0, NULL FROM range({steps}) AS t(s)"
    )
    writer.execute(
        f"INSERT INTO tokens SELECT {engine}, r, s, s, 42, s = 0, {after}, 10000, -0.5, 0.5, 1 "
        f"FROM range({steps}) AS t(s), range({batch}) AS u(r) ORDER BY s, r"
    )
    writer.execute(
        f"INSERT INTO requests SELECT {engine}, r, lpad(to_hex(r + 1), 32, '0'), "
        f"TIMESTAMP '2026-01-01 00:00:00', 10, 0, 9, 50, 0, 'acme', 'chat', 'c' "
        f"FROM range({batch}) AS u(r)"
    )
    last = f"TIMESTAMP '2026-01-01 00:00:00' + INTERVAL 10 MILLISECOND * {steps}"
    writer.execute(
        f"INSERT INTO finishes SELECT {engine}, r, 'length', {steps}, "
        f"TIMESTAMP '2026-01-01 00:00:00', TIMESTAMP '2026-01-01 00:00:00.009', {last}, {last}, "
        f"{last}, {last}, {last} FROM range({batch}) AS u(r)"
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> LakePlace:
    """Two million tokens."""
    place = place_of(tmp_path_factory.mktemp("large"))
    with open_connection(place, read_only=False) as writer:
        fill(writer, steps=20_000, batch=100)
    return place


@pytest.mark.parametrize(
    ("limits", "bound"),
    [({"max_bytes": 2 * MIB}, "bytes"), ({"max_events": 5000}, "events")],
    ids=["bytes", "events"],
)
def test_a_large_lake_is_cut_at_the_limit_and_says_so(
    large: LakePlace, limits: dict[str, int], bound: str
) -> None:
    everything = Selection(start=datetime(2026, 1, 1), end=datetime(2026, 1, 2))
    parsed, summary = export(large, everything, **limits)
    if bound == "bytes":
        assert 0.8 * limits["max_bytes"] < summary.size <= limits["max_bytes"]
    else:
        assert 0.9 * limits["max_events"] < summary.events <= limits["max_events"] + 1
    assert summary.written["tokens"] + summary.left_out["tokens"] == 2_000_000
    assert summary.cut_at is not None
    (args,) = (args for _, name, args in parsed.instants if name.startswith("cut here"))
    assert args["tokens left out"] == summary.left_out["tokens"]
    tokens = [slice_ for slice_ in parsed.slices if slice_.name.startswith("token ")]
    assert len(tokens) == summary.written["tokens"]


def test_the_command_says_what_it_wrote_and_left_out(large: LakePlace, tmp_path: Path) -> None:
    home = Path(large.data).parents[1]
    out = tmp_path / "trace.pftrace"
    command = [sys.executable, "-m", "cli", "export", "perfetto", "-o", str(out)]
    done = subprocess.run(
        [*command, "--slowest", "100", "--max-mib", "1"],
        env={**os.environ, "INFERLOOP_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stat().st_size <= MIB
    Parsed(out.read_bytes())
    wrote, cut = done.stderr.splitlines()
    assert wrote.startswith(f"{out}: ")
    assert cut.startswith("cut at 2026-01-01 00:00:00")
    assert "tokens" in cut
    assert "--max-mib" in cut
    assert list(tmp_path.iterdir()) == [out]
