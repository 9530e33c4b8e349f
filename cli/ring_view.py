"""How `inferloop ring` shows rings in a terminal, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capture.rings.frame_text import FrameLine
from capture.rings.ring_report import ReaderLag, RingReport, RingSummary, Scan
from cli.screen import one_line, size, span

ENGINE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def as_document(report: RingReport) -> dict[str, Any]:
    """The report with identifiers as text; the clocks' anchors are ns, times of frames UTC ns."""
    document = asdict(report)
    header = document["header"]
    header["engine_id"] = str(header["engine_id"])
    header["boot_id"] = str(UUID(bytes=header["boot_id"]))
    document["scan"]["exact"] = report.scan.exact
    return document


def rings_view(found: Sequence[RingSummary]) -> RenderableType:
    """One line per ring, and what is wrong with the files that are none."""
    table = _table("engine", "state", "model", "created (UTC)", "size", "fill", "frames", "tokens",
                   "readers")  # fmt: skip
    for ring in found:
        if ring.problem is None and not ring.capacity_bytes:
            _add(
                table, _short(ring.name), Text("archived", "red"), "", _moment(ring.created_ns)[:-3]
            )
        elif ring.problem is None:
            _add(
                table,
                _short(ring.name),
                _short_state(ring),
                one_line(ring.model or "not known"),
                _moment(ring.created_ns)[:-3],
                size(ring.capacity_bytes),
                f"{ring.fill:.0%}",
                f"{ring.frames:,}",
                f"{ring.tokens:,}",
                ", ".join(f"{one_line(r.name)} {r.share:.0%} behind" for r in ring.readers),
            )
    problems = [Text(one_line(ring.problem), "yellow") for ring in found if ring.problem]
    return Group(table, *problems) if table.row_count else Group(*problems)


def report_view(report: RingReport) -> RenderableType:
    """One ring on one screen."""
    parts: list[RenderableType] = [_facts(report)]
    parts += [Text(), _readers(report.readers)] if report.readers else []
    if report.scan.last:
        parts += [Text(), _frames(report.scan.last)]
    return Group(*parts)


def _facts(report: RingReport) -> Table:
    header, scan = report.header, report.scan
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("ring", one_line(report.path)),
        ("engine", f"{header.engine_id}, created {_moment(header.anchor_wall_ns)} UTC"),
        ("model", _model(report)),
        ("writer", _state(report.alive, report.writer, header.pid)),
        ("format", f"version {report.format_version}, {size(header.capacity)}, "
                   f"frames up to {size(header.frame_limit)}"),
        ("written", f"{report.written_frames:,} frames, {report.written_tokens:,} tokens, "
                    f"{size(report.written_bytes)}"),
        ("rates", _rates(report)),
        ("fill", _fill(report)),
        ("own scan", _scan(scan)),
        ("frames", ", ".join(f"{n:,} {kind}" for kind, n in scan.frames_by_type.items()) or "none"),
        ("readers", f"{len(report.readers)}" if report.readers else "none known"),
    ):  # fmt: skip
        _add(table, name, value)
    return table


def _model(report: RingReport) -> str:
    if report.label is None:
        return "not known: the writer has not said it"
    return one_line(f"{report.label['model']}, build {report.label['fingerprint'][:12]}")


def _rates(report: RingReport) -> str:
    if report.rates is None:
        return "not measured" if report.alive else "none: nobody writes"
    rates = report.rates
    return (
        f"{rates.frames_per_s:,.0f} frames/s, {rates.tokens_per_s:,.0f} tokens/s, "
        f"{size(rates.bytes_per_s)}/s over {rates.window_s:.1f} s"
    )


def _fill(report: RingReport) -> str:
    text = f"{report.fill:.0%}"
    if report.fill >= 1:
        text += ", the oldest is being overwritten" if report.alive else ", the oldest is gone"
    if report.oldest_age_s is not None and report.history_s is not None:
        text += f"; oldest frame {span(report.oldest_age_s)} old, {span(report.history_s)} held"
    return text


def _scan(scan: Scan) -> Text:
    text = (
        f"{scan.delivered_frames:,} delivered + {scan.lost_frames:,} lost = "
        f"{scan.written_frames:,} written frames; {scan.delivered_tokens:,} + "
        f"{scan.lost_tokens:,} = {scan.written_tokens:,} tokens"
    )
    text += f"; {scan.torn_frames} torn" if scan.torn_frames else ""
    text += f"; {scan.corrupt_frames} damaged" if scan.corrupt_frames else ""
    if scan.exact:
        return Text(f"{text}: exact", style="green")
    return Text(f"{text}: DOES NOT ADD UP", style="bold red")


def _readers(readers: Sequence[ReaderLag]) -> Table:
    table = _table("reader", "pid", "behind", "of the ring", "frames", "tokens", "lost tokens",
                   "seen")  # fmt: skip
    for reader in readers:
        _add(
            table,
            one_line(reader.name),
            str(reader.pid),
            size(reader.lag_bytes),
            f"{reader.share:.1%}",
            f"{reader.lag_frames:,}",
            f"{reader.lag_tokens:,}",
            Text(f"{reader.lost_tokens:,}", style="red" if reader.lost_tokens else ""),
            f"{span(reader.seen_ago_s)} ago",
        )
    return table


def _frames(lines: Sequence[FrameLine]) -> Table:
    table = _table("frame", "time (UTC)", "type", "what it says")
    for line in lines:
        at = datetime.fromtimestamp(line.at_ns / 1e9, UTC)
        _add(
            table,
            f"{line.sequence:,}",
            f"{at:%H:%M:%S.%f}",
            line.type,
            Text(one_line(line.text, 2000)),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    numbers = {"pid", "size", "fill", "frames", "tokens", "frame", "behind", "of the ring"}
    for name in names:
        right = name in numbers or name == "lost tokens"
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """A row whose texts are no markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _state(alive: bool, reason: str, pid: int) -> Text:
    return Text(f"pid {pid}: {reason}", style="green" if alive else "red")


def _short_state(ring: RingSummary) -> Text:
    if ring.alive:
        return Text(f"runs ({ring.pid})", "green")
    return Text("ended") if ring.closed else Text("died", "red")


def _short(name: str) -> str:
    """The first digits of an engine id, which are enough to name it; other names as they are."""
    return name[:8] if ENGINE_ID.fullmatch(name) else one_line(name)


def _moment(wall_ns: int) -> str:
    return f"{datetime.fromtimestamp(wall_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}"
