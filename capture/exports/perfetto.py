"""The lake as a Perfetto trace: open it at ui.perfetto.dev and see why a token was late.

One process per engine; below it a track per request (queued, prefill, decode with its tokens,
sending), the steps, kernels, counters, events and losses; arrows from a token to its step and from
a step to its kernels. Ends at a stated size, and says in the trace what was left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, NamedTuple

from capture.exports.perfetto_file import Args, TraceFile, Track
from capture.exports.perfetto_source import Row, Slice, TraceSource
from capture.exports.perfetto_tracks import EngineTracks, RequestTrack
from capture.exports.selection import Selection, choose

if TYPE_CHECKING:
    import duckdb

MAX_EVENTS = 500_000
REQUEST_BYTES, STEP_BYTES, TOKEN_BYTES, KERNEL_BYTES, SAMPLE_BYTES = 4096, 1600, 320, 320, 800
CLOSING_BYTES, CLOSING_REQUEST_BYTES = 64 << 10, 400


class Item(NamedTuple):
    """Something to draw: when it begins, and at most how much it adds."""

    at_us: int
    order: int
    draw: Callable[[], None]
    size: int
    events: int


@dataclass
class Summary:
    """What the trace holds of what was chosen; `cut_at` when the limit was reached."""

    events: int = 0
    size: int = 0
    written: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    cut_at: datetime | None = None


def export_perfetto(
    lake: duckdb.DuckDBPyConnection,
    selection: Selection,
    stream: IO[bytes],
    *,
    max_bytes: int,
    max_events: int = MAX_EVENTS,
) -> Summary:
    """Write the chosen part of the lake to `stream`, at most `max_bytes` and `max_events`.

    An event is a slice, an instant or a counter's value. Raises ExportError when nothing is chosen.
    """
    source = TraceSource(lake, choose(lake, selection))
    return _Export(source, stream, max_bytes, max_events).run()


class _Export:
    """One trace in the making."""

    def __init__(
        self, source: TraceSource, stream: IO[bytes], max_bytes: int, max_events: int
    ) -> None:
        self._source = source
        self._file = TraceFile(stream, source.start_us * 1000)
        self._max_bytes = max_bytes
        self._max_events = max_events
        self._totals = source.totals()
        self._written = dict.fromkeys(self._totals, 0)
        self._about = self._file.group("export", "inferloop export")
        losses: dict[str, list[Row]] = {}
        for row in source.losses():
            losses.setdefault(row["engine_id"], []).append(row)
        self._engines = {
            row["engine_id"]: EngineTracks(self._file, row, losses.get(row["engine_id"], []))
            for row in source.engines()
        }
        self._open: dict[tuple[str, int], RequestTrack] = {}
        self._waiting: list[Item] = []

    def run(self) -> Summary:
        note = self._file.track("notes", "notes", self._about)
        start_ns = self._source.start_us * 1000
        self._file.instant(note, start_ns, "exported by inferloop", self._described())
        cut_us = None
        for part in self._source.slices():
            cut_us = self._draw(part)
            if cut_us is not None:
                break
        end_us = self._source.end_us if cut_us is None else cut_us
        for request in self._open.values():
            request.close(end_us)
        for engine in self._engines.values():
            engine.draw_other_losses(end_us)
        summary = Summary(written=self._written)
        if cut_us is not None:
            self._say_cut(note, cut_us, summary)
        summary.events, summary.size = self._file.events, self._file.size
        return summary

    def _draw(self, part: Slice) -> int | None:
        """Draw what began in the slice; the time where the limit was reached."""
        items = [*self._waiting, *self._items(part)]
        items.sort(key=lambda item: item[:2])
        self._waiting = [item for item in items if item.at_us >= part.end_us]
        for item in items:
            if item.at_us >= part.end_us:
                break
            if not self._fits(item):
                return item.at_us
            item.draw()
        return None

    def _fits(self, item: Item) -> bool:
        closing = CLOSING_BYTES + CLOSING_REQUEST_BYTES * (len(self._open) + len(self._waiting))
        return (
            self._file.size + item.size + closing <= self._max_bytes
            and self._file.events + item.events <= self._max_events
        )

    def _items(self, part: Slice) -> list[Item]:
        items = [item for row in part.requests for item in self._request(row)]
        items += [self._step(row, part) for row in part.steps]
        items += [self._orphan(row) for row in part.orphans]
        for row in part.events:
            size = 2 * SAMPLE_BYTES + 4 * len(f"{row['kind']}{row.get('detail')}")
            items.append(self._of_engine(EngineTracks.draw_event, row, 3, size, 1))
        for row in part.gpu:
            items.append(self._of_engine(EngineTracks.draw_gpu, row, 4, 2 * SAMPLE_BYTES, 5))
        for row in part.memory:
            items.append(self._of_engine(EngineTracks.draw_memory, row, 4, 2 * SAMPLE_BYTES, 4))
        return items

    def _of_engine(
        self,
        draw: Callable[[EngineTracks, Row], None],
        row: Row,
        order: int,
        size: int,
        events: int,
    ) -> Item:
        engine = self._engines[row["engine_id"]]
        return Item(row["at_us"], order, lambda: draw(engine, row), size, events)

    def _request(self, row: Row) -> list[Item]:
        """Its arrival, and its admission and end where they are known."""
        key = (row["engine_id"], row["slot"])

        def draw() -> None:
            engine = self._engines[row["engine_id"]]
            self._open[key] = RequestTrack(self._file, engine.requests, row, self._source.start_us)
            self._written["requests"] += 1

        arrived = max(row["arrived_us"], self._source.start_us)
        items = [Item(arrived, 0, draw, REQUEST_BYTES, 5)]
        if row["admitted_us"] is not None:
            admitted = max(row["admitted_us"], arrived)
            items.append(Item(admitted, 1, lambda: self._admit(key, admitted), SAMPLE_BYTES, 1))
        if row["finished_us"] is not None:
            ended = max(row["finished_us"], row["flushed_us"] or 0, arrived)
            items.append(Item(ended, 5, lambda: self._finish(key), SAMPLE_BYTES, 1))
        return items

    def _admit(self, key: tuple[str, int], at_us: int) -> None:
        if key in self._open:
            self._open[key].admit(at_us)

    def _finish(self, key: tuple[str, int]) -> None:
        if key in self._open:
            self._open.pop(key).finish()

    def _step(self, row: Row, part: Slice) -> Item:
        key = (row["engine_id"], row["step_id"])
        tokens, kernels = part.tokens.get(key, []), part.kernels.get(key, [])

        def draw() -> None:
            engine = self._engines[row["engine_id"]]
            arrows = [self._token(token, row["at_us"]) for token in tokens]
            engine.draw_step(row, kernels, tuple(arrow for arrow in arrows if arrow is not None))
            self._written["steps"] += 1
            self._written["kernels"] += len(kernels)

        size = STEP_BYTES + TOKEN_BYTES * len(tokens) + KERNEL_BYTES * len(kernels)
        return Item(row["at_us"], 2, draw, size, 10 + len(tokens) + len(kernels))

    def _orphan(self, row: Row) -> Item:
        """A token whose step's own figures were lost."""

        def draw() -> None:
            self._token(row, None)

        return Item(row["at_us"], 2, draw, TOKEN_BYTES, 1)

    def _token(self, row: Row, step_start_us: int | None) -> int | None:
        """Draw a token on its request's track; the arrow to its step."""
        request = self._open.get((row["engine_id"], row["slot"]))
        if request is None:
            return None
        self._written["tokens"] += 1
        return request.token(row, step_start_us)

    def _described(self) -> Args:
        start, end = _iso(self._source.start_us), _iso(self._source.end_us)
        totals = {f"{name} chosen": count for name, count in self._totals.items()}
        return {"from (UTC)": start, "to (UTC)": end, **totals}

    def _say_cut(self, note: Track, cut_us: int, summary: Summary) -> None:
        summary.cut_at = datetime.fromtimestamp(cut_us / 1e6, UTC).replace(tzinfo=None)
        summary.left_out = {
            name: max(count - self._written[name], 0) for name, count in self._totals.items()
        }
        args: Args = {"limit in bytes": self._max_bytes, "limit in events": self._max_events}
        args |= {f"{name} left out": count for name, count in summary.left_out.items()}
        self._file.instant(note, cut_us * 1000, "cut here: the size limit was reached", args)


def _iso(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="microseconds")
