"""A/A/B replays of a fake engine: planted changes are found, localised, and noise is not one."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

import migrations
from replay.builds import BuildSpec
from replay.database import open_sessions
from replay.errors import BuildError, RunError
from replay.models import Diff, ReplayedRequest, Run
from replay.run import Bounds, replay, state
from tests.migrations.postgres import postgres_server
from tests.proc import is_running, parent
from tests.replay.conftest import ROOT, prompts, toy, traffic
from tests.waiting import PATIENCE_S, until

Sessions = sessionmaker[Session]
Toys = Callable[[str], BuildSpec]
ANY_LATENESS = Bounds(lateness_p99_ms=math.inf)


def run(
    sessions: Sessions, tmp_path: Path, old: BuildSpec, new: BuildSpec, count: int = 12, **more: Any
) -> Run:
    path = traffic(tmp_path / "t.jsonl", prompts(count), **more)
    return replay(
        sessions, old=old, new=new, traffic=path, out_dir=tmp_path / "runs", bounds=ANY_LATENESS,
    )  # fmt: skip


def diffs(sessions: Sessions, run: Run, pair: str) -> list[Diff]:
    with sessions() as session:
        query = select(Diff).where(Diff.run_id == run.id, Diff.pair == pair)
        return list(session.scalars(query))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("template", "prompt"),
        ("bos", "prompt_ids"),
        ("sampling", "sampling"),
        ("stop", "stop"),
        ("flip", "output"),
        ("detokenizer", "text"),
        ("finish", "finish"),
    ],
)
def test_a_planted_change_is_localised(
    sessions: Sessions, tmp_path: Path, toys: Toys, fault: str, kind: str
) -> None:
    result = run(sessions, tmp_path, toys("plain"), toys(fault), unset="temperature")
    assert result.status == "valid", result.reason
    assert {diff.kind for diff in diffs(sessions, result, "noise")} == {"same"}
    kinds = {diff.kind for diff in diffs(sessions, result, "change")}
    assert kind in kinds
    assert kinds <= {kind, "same"}
    assert result.summary["noise"]["differing"] == 0
    assert result.summary["changes"]["beyond_noise"] > 0
    if fault == "flip":
        for diff in diffs(sessions, result, "change"):
            assert diff.first_divergent == 3
            assert diff.margin is not None
            with sessions() as session:
                left = session.get_one(ReplayedRequest, diff.left_id)
                assert left.margins is not None
                assert diff.margin == left.margins[3]


def test_the_same_build_shows_nothing(sessions: Sessions, tmp_path: Path) -> None:
    items = [*prompts(10), {"prompt": "Once upon a time", "temperature": 0.8, "seed": 3}]
    path = traffic(tmp_path / "t.jsonl", items)
    seen: list[tuple[str, int, int]] = []
    result = replay(
        sessions, old=toy(), new=toy(), traffic=path, out_dir=tmp_path / "runs",
        progress=lambda what, done, total: seen.append((what, done, total)),
        bounds=ANY_LATENESS,
    )  # fmt: skip
    assert result.status == "valid", result.reason
    assert result.summary["changes"]["share"] == 0
    assert [change["pairs"] for change in result.summary["latency"]] == [11] * 4
    assert {("old_a", 11, 11), ("new", 11, 11), ("old_b", 11, 11)} <= set(seen)
    with sessions() as session:
        rows = list(session.scalars(select(ReplayedRequest)))
    assert len(rows) == 33
    assert all(row.error is None and row.ttft_ms and row.output_token_ids for row in rows)
    assert {row.class_key for row in rows} == {"t/chat/-", "default/completions/-"}
    written = json.loads((Path(result.summary["directory"]) / "summary.json").read_text())
    assert written["run"] == result.id
    assert written["noise"] == result.summary["noise"]


def test_noise_of_the_old_build_is_not_called_a_change(
    sessions: Sessions, tmp_path: Path, toys: Toys
) -> None:
    result = run(sessions, tmp_path, toys("noise"), toys("noise"), count=40)
    assert result.status == "valid", result.reason
    noise, changes = result.summary["noise"], result.summary["changes"]
    assert noise["differing"] > 5
    assert changes["beyond_noise"] < changes["differing"]
    marked = [diff for diff in diffs(sessions, result, "change") if diff.detail["also_in_noise"]]
    assert len(marked) == noise["differing"]


def test_a_slower_build_is_called_slower(sessions: Sessions, tmp_path: Path, toys: Toys) -> None:
    result = run(sessions, tmp_path, toys("plain"), toys("slow"), count=15, interval_s=0.05)
    verdicts = {change["metric"]: change["verdict"] for change in result.summary["latency"]}
    assert verdicts["tpot_ms"] == "slower"
    tpot = next(change for change in result.summary["latency"] if change["metric"] == "tpot_ms")
    assert tpot["change"]["low"] > 2  # of 30: what the machine itself adds to a token counts too
    assert result.summary["changes"]["share"] == 0


def test_failures_make_the_run_invalid(sessions: Sessions, tmp_path: Path, toys: Toys) -> None:
    result = run(sessions, tmp_path, toys("plain"), toys("errors"))
    assert result.status == "invalid"
    assert result.reason is not None
    assert "new: 4 of 12 requests failed (33%" in result.reason
    failed = [diff for diff in diffs(sessions, result, "change") if diff.kind == "error"]
    assert len(failed) == 4
    assert failed[0].detail["error"] == [None, "the toy is broken"]


@pytest.mark.parametrize("count", [12, 4])
def test_a_crash_makes_the_run_invalid_be_it_at_the_last_request(
    sessions: Sessions, tmp_path: Path, toys: Toys, count: int
) -> None:
    crashed = run(sessions, tmp_path, toys("plain"), toy("crash"), count=count)
    assert crashed.status == "invalid"
    assert "ended with exit code 7" in str(crashed.reason)


def test_late_sending_makes_the_run_invalid(sessions: Sessions, tmp_path: Path, toys: Toys) -> None:
    path = traffic(tmp_path / "t.jsonl", prompts(5))
    result = replay(
        sessions, old=toys("plain"), new=toys("plain"), traffic=path, out_dir=tmp_path / "runs",
        bounds=Bounds(lateness_p99_ms=0.0),
    )  # fmt: skip
    assert result.status == "invalid"
    assert "requests were sent late" in str(result.reason)


def test_an_engine_without_extensions_is_replayed_by_text(
    sessions: Sessions, tmp_path: Path, toys: Toys
) -> None:
    items = [*(prompt | {"top_k": 5} for prompt in prompts(6)), {"prompt": "plain"}]
    path = traffic(tmp_path / "t.jsonl", items)
    result = replay(
        sessions, old=toys("foreign"), new=toys("foreign-detokenizer"), traffic=path,
        out_dir=tmp_path / "runs", bounds=ANY_LATENESS,
    )  # fmt: skip
    assert result.status == "valid", result.reason
    changed = [diff for diff in diffs(sessions, result, "change") if diff.kind != "same"]
    assert changed
    assert {diff.kind for diff in changed} == {"output"}
    assert result.old_build.components["models"] == [{"id": "toy"}]
    with sessions() as session:
        row = session.scalars(select(ReplayedRequest)).first()
    assert row is not None
    assert row.output_token_ids is None
    assert row.itl_ms
    assert row.margins


def test_turns_of_a_conversation_keep_their_order(
    sessions: Sessions, tmp_path: Path, toys: Toys
) -> None:
    items = [prompt | {"conversation": f"c{n % 2}"} for n, prompt in enumerate(prompts(8))]
    path = traffic(tmp_path / "t.jsonl", items, interval_s=0.001)
    result = replay(
        sessions, old=toys("plain"), new=toys("plain"), traffic=path, speed=2.0,
        out_dir=tmp_path / "runs", bounds=ANY_LATENESS,
    )  # fmt: skip
    assert result.status == "valid", result.reason
    assert result.summary["arms"]["old_a"]["lateness"]["held_back"] <= 6
    with sessions() as session:
        query = select(ReplayedRequest).where(ReplayedRequest.arm == "old_a")
        rows = sorted(session.scalars(query), key=lambda row: row.scheduled_ms)
    for turns in (rows[0::2], rows[1::2]):
        for before, after in pairwise(turns):
            assert after.sent_ms >= before.sent_ms + (before.duration_ms or 0)


UNHEALTHY = """
import socket, sys
answer = b"HTTP/1.1 503 Loading\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n"
print("still loading the weights", flush=True)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    with listener.accept()[0] as connection:
        connection.recv(65536)
        connection.sendall(answer)
"""
"""Up in a moment, where a real server may need longer than a test can wait to see it fail."""


def test_a_build_that_never_becomes_healthy_leaves_no_run(
    sessions: Sessions, tmp_path: Path, toys: Toys
) -> None:
    command = f"{sys.executable} -I -S {tmp_path / 'unhealthy.py'} {{port}}"
    (tmp_path / "unhealthy.py").write_text(UNHEALTHY)
    spec = BuildSpec(name="unhealthy", command=command, health_timeout_s=5)
    with pytest.raises(BuildError, match=r"not healthy after 5 s \(status 503") as caught:
        run(sessions, tmp_path, toys("plain"), spec)
    assert "still loading the weights" in str(caught.value)
    with sessions() as session:
        assert session.scalars(select(Run)).all() == []


def test_a_run_stays_valid_when_its_summary_cannot_be_written(
    sessions: Sessions, tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_way(out_dir: Path) -> Path:
        (out_dir / "summary.json").mkdir(parents=True)
        return out_dir

    monkeypatch.setattr("replay.run._make_directory", in_the_way)
    with pytest.raises(RunError, match=r"run 1 is complete \(valid\), but .*summary.json"):
        run(sessions, tmp_path, toys("plain"), toys("plain"), count=2)
    with sessions() as session:
        assert session.scalars(select(Run.status)).all() == ["valid"]


def test_bad_speed_is_refused(sessions: Sessions, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not above 0"):
        replay(
            sessions, old=toy(), new=toy(), traffic=tmp_path, out_dir=tmp_path, speed=0.0
        )  # fmt: skip


def test_a_run_is_stored_in_postgresql(tmp_path: Path, toys: Toys) -> None:
    with postgres_server() as url:
        migrations.upgrade(url)
        sessions = open_sessions(url)
        result = run(sessions, tmp_path, toys("plain"), toys("flip"), count=4)
        assert result.status == "valid", result.reason
        assert {diff.kind for diff in diffs(sessions, result, "change")} == {"output"}
        sessions.kw["bind"].dispose()


PROGRAM = """
import sys
from pathlib import Path
from replay.database import open_sessions
from replay.run import replay
from tests.replay.conftest import toy
url, traffic, out = sys.argv[1:]
try:
    replay(open_sessions(url), old=toy("helper", token_ms=20), new=toy("helper", token_ms=20),
           traffic=Path(traffic), out_dir=Path(out))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.kill
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_replay_leaves_no_process_and_a_clear_state(
    sessions: Sessions, tmp_path: Path, number: signal.Signals
) -> None:
    path = traffic(tmp_path / "t.jsonl", prompts(2000), interval_s=0.02)
    url = f"sqlite:///{tmp_path / 'replay.sqlite'}"
    out = tmp_path / "runs"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, url, str(path), str(out)], cwd=ROOT)
    try:
        until(lambda: _rows(sessions) > 10, "some rows", poll_s=0.1)
        assert _toys(out)
        process.send_signal(number)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
    until(lambda: not _toys(out), "the builds have ended", poll_s=0.1)
    with sessions() as session:
        (left,) = session.scalars(select(Run))
    if number == signal.SIGKILL:
        assert left.status == "running"
        assert state(left) == "killed while running"
    else:
        assert process.returncode == 130
        assert left.status == "aborted"
        assert "interrupted" in str(left.reason)
    assert _rows(sessions) > 10


def _rows(sessions: Sessions) -> int:
    with sessions() as session:
        return len(session.scalars(select(ReplayedRequest.id)).all())


def _toys(out: Path) -> list[int]:
    """Process ids of the run's builds that are alive: the helpers and their engines."""
    found = []
    for log in out.glob("*/*.log"):
        words = log.read_text().split()
        if "helper" in words:
            pid = int(words[words.index("helper") + 1])
            for process in (pid, parent(pid)):
                if process > 1 and is_running(process):
                    found.append(process)
    return found
