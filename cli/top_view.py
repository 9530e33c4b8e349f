"""How `inferloop top` shows the engines: as a screen, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capture.live import LiveSnapshot, Percentiles, TenantActivity
from capture.rings.ring_report import ReaderLag
from capture.watch import EngineView, WatchView
from cli.screen import one_line, size, span

TENANT_ROWS = 10
LEAST_ROWS = 12  # that an engine's details need
STUCK_S = 2.0  # of work, without a step: stopped, or a very long one
LAG_WARNING = 0.5  # of a ring: the rest may be overwritten before it is read


def as_document(view: WatchView) -> dict[str, Any]:
    """For scripts: the same figures, times of events as UTC ns."""
    document = asdict(view)
    for engine in document["engines"]:
        for event in engine["live"]["events"]:
            event["at_ns"] += engine["anchor_wall_ns"] - engine["anchor_monotonic_ns"]
    return document


def watch_view(view: WatchView, rows: int | None = None) -> RenderableType:
    """All engines, the busiest first. `rows`: of the terminal; engines that do not fit get a line
    each, and the first one what is left."""
    parts: list[RenderableType] = []
    notes = _notes(view)
    left = None if rows is None else rows - len(notes)
    full = [_engine(engine, None) for engine in view.engines]
    if left is None or sum(map(len, full)) <= left:
        for block in full:
            parts += [*block.parts, Text()]
    elif len(full) == 1:
        parts += _engine(view.engines[0], left).parts
    else:
        lines = _overview(view.engines, left - 2)
        rest = left - lines.row_count - 2
        parts.append(lines)
        if rest >= LEAST_ROWS:
            parts += [Text(), *_engine(view.engines[0], rest).parts]
    return Group(*parts, *notes)


@dataclass
class _Block:
    """Some of the screen; its length is in lines, unless a narrow terminal folds them."""

    parts: list[RenderableType] = field(default_factory=list)
    lines: int = 0

    def __len__(self) -> int:
        return self.lines + 1  # and an empty one

    def add(self, *parts: Text | Table) -> None:
        self.parts += parts
        self.lines += sum(
            part.row_count + part.show_header if isinstance(part, Table) else 1 for part in parts
        )


def _engine(engine: EngineView, rows: int | None) -> _Block:
    """One engine in all detail; in `rows` lines some tenants and the older events are left out."""
    live, block = engine.live, _Block()
    block.add(_title(engine), _figures(engine))
    tenants, events = TENANT_ROWS, len(live.events)
    if rows is not None:
        left = rows - block.lines
        tenants = min(TENANT_ROWS, max(1, left // 2 - 3))
        shown = min(len(live.tenants), tenants)
        table = 2 + shown + (len(live.tenants) > shown) if live.tenants else 0
        events = max(0, min(events, left - table - 1))
    if live.tenants:
        block.add(Text(), _tenants(live.tenants, tenants))
    if events:
        block.add(Text(), *_events(engine, events))
    return block


def _overview(engines: Sequence[EngineView], rows: int) -> Table:
    """A line for each engine, as far as they fit."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("engine", no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=24)
    for name in ("run", "wait", "tokens/s", "TTFT p99 ms", "ITL p99 ms", "KV"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True, style="red")
    shown = len(engines) if len(engines) <= rows else max(1, rows - 1)
    for engine in engines[:shown]:
        live = engine.live
        table.add_row(
            engine.engine_id[:8],
            Text(one_line(engine.model or "not known", 60)),
            f"{live.running:,}",
            f"{live.waiting:,}",
            f"{live.tokens_per_s:,.0f}",
            _milliseconds(live.ttft.p99_ms),
            _milliseconds(live.itl.p99_ms),
            f"{live.kv_used / live.kv_total:.0%}" if live.kv_total else "",
            Text(_trouble(engine)),
        )
    if engines[shown:]:
        table.add_row(f"{len(engines) - shown:,} more")
    return table


def _trouble(engine: EngineView) -> str:
    """What is wrong with an engine, in a word or two."""
    live = engine.live
    if engine.ended_ago_s is not None:
        return f"ended: {engine.writer}"
    if _is_stuck(live):
        return f"no step for {span(live.step_age_s or 0.0)}"
    return "losses" if _losses(engine).plain != "none" else ""


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _notes(view: WatchView) -> list[Text]:
    notes = []
    if not view.engines:
        notes.append(Text(f"no engine is running: no living ring in {one_line(view.directory)}"))
        notes.append(Text("start one with `inferloop serve`; it appears here by itself"))
    if view.waiting_rings:
        notes.append(_note(f"{_many(view.waiting_rings, 'ring')} of ended engines: `inferloop "
                           "collect` brings them into the lake"))  # fmt: skip
    return notes + [_note(one_line(problem)) for problem in view.problems]


def _title(engine: EngineView) -> Text:
    model = one_line(engine.model or "model not known", 60)
    build = one_line(engine.build or "not known")[:12]
    title = Text.assemble((model, "bold"), f"  build {build}  engine {engine.engine_id[:8]}  ")
    if engine.ended_ago_s is None:
        title.append(f"pid {engine.pid}", "green")
    else:
        title.append(f"ended {span(engine.ended_ago_s)} ago: {engine.writer}", "bold red")
    return title


def _figures(engine: EngineView) -> Table:
    live = engine.live
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    lines: list[tuple[str, str | Text]] = [
        ("requests", _requests(live)),
        ("tokens", f"{live.tokens_per_s:,.0f}/s in {live.steps_per_s:,.1f} steps/s, "
                   f"last {live.window_s:.1f} s"),
        ("TTFT", _latency(live.ttft, "requests")),
        ("ITL", _latency(live.itl, "tokens")),
        ("KV cache", _cache(live)),
        ("losses", _losses(engine)),
        ("collector", _collector(engine.readers)),
    ]  # fmt: skip
    lines += [("reader", _lag(lag)) for lag in engine.readers if lag.name != "collector"]
    lines += [("device", text) for text in live.devices or ["not available: no sample yet"]]
    lines += [("memory", text) for text in live.memory]
    for name, value in lines:
        table.add_row(name, value if isinstance(value, Text) else Text(one_line(value)))
    return table


def _requests(live: LiveSnapshot) -> Text:
    text = Text(f"{live.running:,} running, {live.waiting:,} waiting")
    if _is_stuck(live):
        text.append(f"; no step for {span(live.step_age_s or 0.0)}", "bold red")
    if live.finished:
        ended = ", ".join(f"{count:,} {reason}" for reason, count in live.finished.items())
        rate = sum(live.finished.values()) / live.window_s
        text.append(one_line(f"; {rate:,.1f}/s finished ({ended})"))
    return text


def _is_stuck(live: LiveSnapshot) -> bool:
    return live.running > 0 and live.step_age_s is not None and live.step_age_s > STUCK_S


def _latency(values: Percentiles, unit: str) -> str:
    if values.p50_ms is None or values.p99_ms is None:
        return f"no {unit}"
    return f"p50 {values.p50_ms:,.1f} ms   p99 {values.p99_ms:,.1f} ms   of {values.count:,} {unit}"


def _cache(live: LiveSnapshot) -> str:
    if not live.kv_total:
        return "not known"
    share = live.kv_used / live.kv_total
    text = f"{live.kv_used:,} of {live.kv_total:,} blocks ({share:.0%})"
    if live.prefix_hit_share is not None:
        text += f"; {live.prefix_hit_share:.0%} of prompt tokens from the prefix cache"
    return f"{text}; {_many(live.preemptions, 'preemption')}"


def _losses(engine: EngineView) -> Text:
    live, text = engine.live, Text()
    if live.skipped_tokens:
        text.append(
            f"sampled: {live.skipped_tokens:,} tokens skipped to keep up, percentiles of "
            f"{live.sampled_share:.0%}  ",
            "yellow",
        )
    if live.lost_tokens or live.lost_frames:
        lost = f"{live.lost_tokens:,} tokens, {live.lost_frames:,} frames overwritten unread here  "
        text.append(lost, "red")
    if live.undecodable:
        text.append(f"{live.undecodable:,} frames could not be decoded  ", "red")
    for reader in engine.readers:
        if reader.lost_tokens or reader.lost_frames:
            lost = (
                f"{reader.name} lost {reader.lost_tokens:,} tokens, {reader.lost_frames:,} frames"
            )
            text.append(one_line(lost), "red")
    return text if text.plain else Text("none")


def _collector(readers: Sequence[ReaderLag]) -> Text:
    for reader in readers:
        if reader.name == "collector":
            return _lag(reader)
    return Text("none follows this ring: `inferloop collect`", "yellow")


def _lag(reader: ReaderLag) -> Text:
    text = (
        f"{size(reader.lag_bytes)} behind ({reader.share:.1%} of the ring, "
        f"{reader.lag_tokens:,} tokens), seen {span(reader.seen_ago_s)} ago"
    )
    if reader.name != "collector":
        text = f"{reader.name} (pid {reader.pid}) {text}"
    return Text(one_line(text), "red" if reader.share > LAG_WARNING else "")


def _tenants(tenants: Sequence[TenantActivity], rows: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("tenant", overflow="ellipsis", no_wrap=True, max_width=40)
    for name in ("running", "finished", "tokens/s", "TTFT p50 ms", "TTFT p99 ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in tenants[:rows]:
        table.add_row(
            Text(one_line(one.tenant, 100) or "(none)"),
            f"{one.running:,}",
            f"{one.finished:,}",
            f"{one.tokens_per_s:,.0f}",
            _milliseconds(one.ttft.p50_ms),
            _milliseconds(one.ttft.p99_ms),
        )
    rest = tenants[rows:]
    if rest:
        running, ended = sum(one.running for one in rest), sum(one.finished for one in rest)
        rate = sum(one.tokens_per_s for one in rest)
        table.add_row(
            Text(f"{len(rest):,} more", "dim"), f"{running:,}", f"{ended:,}", f"{rate:,.0f}"
        )
    return table


def _events(engine: EngineView, rows: int) -> list[Text]:
    """The newest ones, a line each: what is too long for it is cut at the end."""
    lines = []
    offset_ns = engine.anchor_wall_ns - engine.anchor_monotonic_ns
    for event in engine.live.events[-rows:]:
        often = f"{event.count:,} times, last " if event.count > 1 else ""
        at = datetime.fromtimestamp((event.at_ns + offset_ns) / 1e9, UTC)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{at:%H:%M:%S}", "dim").append(f"  {often}{one_line(event.text, 300)}")
        lines.append(line)
    return lines


def _note(text: str) -> Text:
    return Text(text, "yellow")


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"
