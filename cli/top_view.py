"""How `inferloop top` shows the engines: as a screen, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capture.live import LiveSnapshot, Percentiles, TenantActivity
from capture.ring_report import ReaderLag
from capture.watch import EngineView, WatchView
from cli.screen import one_line, size, span

TENANT_ROWS = 10
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
    """All engines, the busiest first; `rows`: of the terminal, to leave out what does not fit."""
    parts: list[RenderableType] = []
    for engine in view.engines:
        tenants = TENANT_ROWS if rows is None or rows > 40 else max(3, rows - 26)
        parts += [_title(engine), _figures(engine)]
        if engine.live.tenants:
            parts += [Text(), _tenants(engine.live.tenants, tenants)]
        if engine.live.events:
            parts += [Text(), _events(engine)]
        parts.append(Text())
    if not view.engines:
        parts.append(Text(f"no engine is running: no living ring in {one_line(view.directory)}"))
        parts.append(Text("start one with `inferloop serve`; it appears here by itself"))
    if view.waiting_rings:
        parts.append(_note(f"{_many(view.waiting_rings, 'ring')} of ended engines: `inferloop "
                           "collect` brings them into the lake"))  # fmt: skip
    parts += [_note(one_line(problem)) for problem in view.problems]
    return Group(*parts)


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
    if live.running and live.step_age_s is not None and live.step_age_s > STUCK_S:
        text.append(f"; no step for {span(live.step_age_s)}", "bold red")
    if live.finished:
        ended = ", ".join(f"{count:,} {reason}" for reason, count in live.finished.items())
        rate = sum(live.finished.values()) / live.window_s
        text.append(one_line(f"; {rate:,.1f}/s finished ({ended})"))
    return text


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
            "" if one.ttft.p50_ms is None else f"{one.ttft.p50_ms:,.1f}",
            "" if one.ttft.p99_ms is None else f"{one.ttft.p99_ms:,.1f}",
        )
    rest = tenants[rows:]
    if rest:
        running, ended = sum(one.running for one in rest), sum(one.finished for one in rest)
        rate = sum(one.tokens_per_s for one in rest)
        table.add_row(
            Text(f"{len(rest):,} more", "dim"), f"{running:,}", f"{ended:,}", f"{rate:,.0f}"
        )
    return table


def _events(engine: EngineView) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    offset_ns = engine.anchor_wall_ns - engine.anchor_monotonic_ns
    for event in engine.live.events:
        at = datetime.fromtimestamp((event.at_ns + offset_ns) / 1e9, UTC)
        table.add_row(f"{at:%H:%M:%S}", Text(one_line(event.text, 300)))
    return table


def _note(text: str) -> Text:
    return Text(text, "yellow")


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"
