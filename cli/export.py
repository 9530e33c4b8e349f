"""`inferloop export`: the lake in other tools' formats."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.main import app
from cli.screen import size

if TYPE_CHECKING:
    from capture.exports.otlp import OtlpExporter
    from capture.exports.otlp_source import Cursor
    from capture.exports.perfetto import Summary

TIME_HELP = "ISO 8601 time, UTC unless it has an offset."

group = typer.Typer(
    no_args_is_help=True,
    help="Give the lake's traces to Perfetto and OpenTelemetry.\n\n"
    "Example:  inferloop export perfetto --slowest 3 --out trace.pftrace",
)
app.add_typer(group, name="export")


@group.command()
def perfetto(
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace file to write.")],
    request: Annotated[
        list[str] | None,
        typer.Option(help="A request's id, or its beginning; may be given several times."),
    ] = None,
    slowest: Annotated[
        int | None, typer.Option(min=1, help="The so many requests that took longest.")
    ] = None,
    start: Annotated[str | None, typer.Option("--from", help=TIME_HELP)] = None,
    end: Annotated[str | None, typer.Option("--to", help=TIME_HELP)] = None,
    max_mib: Annotated[
        int, typer.Option(min=1, max=2048, help="Largest trace; it has 500,000 events at most.")
    ] = 100,
) -> None:
    """Write a trace for ui.perfetto.dev: requests, steps, kernels, counters, losses.

    Without a selection: the lake's last minute. What the size limit leaves out is said here
    and in the trace.

    Example:  inferloop export perfetto --slowest 3 --out trace.pftrace

    Example:  inferloop export perfetto --from 2026-11-29T14:00 --to 2026-11-29T14:05 -o t.pftrace
    """
    from capture.atomic_file import opened
    from capture.exports.perfetto import export_perfetto
    from capture.exports.selection import ExportError, Selection
    from capture.lake import open_connection
    from capture.settings import Settings

    if request and slowest is not None:
        raise ExportError("--request and --slowest are two selections: give one of them")
    selection = Selection(tuple(request or ()), slowest, _time(start), _time(end))
    with open_connection(Settings()) as lake, opened(out) as stream:
        summary = export_perfetto(lake, selection, stream, max_bytes=max_mib << 20)
    typer.echo(_described(out, summary), err=True)


def _described(out: Path, summary: Summary) -> str:
    counts = ", ".join(f"{count:,} {name}" for name, count in summary.written.items())
    text = f"{out}: {size(summary.size)}, {summary.events:,} events: {counts}"
    if summary.cut_at is None:
        return text
    left = ", ".join(f"{count:,} {name}" for name, count in summary.left_out.items() if count)
    return (
        f"{text}\ncut at {summary.cut_at} UTC, where the size limit was reached; left out: {left}. "
        "Choose less (--request, --slowest, --from and --to) or allow more (--max-mib)"
    )


@group.command()
def otlp(
    endpoint: Annotated[
        str, typer.Option(help="OTLP over HTTP, without /v1/traces: http://HOST:4318.")
    ],
    start: Annotated[
        str | None, typer.Option("--from", help=f"Requests that finished from then. {TIME_HELP}")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="Until then. " + TIME_HELP)] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with requests as they finish, until Ctrl-C.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds a batch may take, retries included.")
    ] = 10.0,
) -> None:
    """Send finished requests as OpenTelemetry spans and metrics (GenAI names).

    Goes on where the last export to this endpoint ended (a file in <home>/exports); with
    --from or --to it sends that window and leaves that file alone. At least once: what an
    endpoint did not confirm is sent again, with the same span ids. Headers and certificates:
    OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE.

    Example:  inferloop export otlp --endpoint http://localhost:4318 --follow
    """
    from capture.exports.otlp import OtlpExporter, Target, export_once
    from capture.exports.otlp_source import Cursor, alone
    from capture.exports.selection import ExportError
    from capture.lake import open_connection
    from capture.settings import Settings

    window = (_time(start), _time(end))
    if follow and window != (None, None):
        raise ExportError("--follow goes on from the last export: leave out --from and --to")
    target, settings = Target(endpoint, timeout), Settings()
    with open_connection(settings) as lake:
        exporter = OtlpExporter(lake, target, _say)
        file = target.cursor_file(settings.home)
        try:
            if window != (None, None):
                export_once(exporter, Cursor(), lambda _: None, *window)
            else:
                with alone(file):
                    (_follow if follow else export_once)(
                        exporter, Cursor.load(file), lambda cursor: cursor.save(file)
                    )
        finally:
            exporter.close()
    _say(f"{exporter.requests:,} requests sent to {endpoint}")


def _follow(exporter: OtlpExporter, cursor: Cursor, keep: Callable[[Cursor], None]) -> None:
    from capture.exports.otlp import follow

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    follow(exporter, cursor, keep, stop, _say)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _time(text: str | None) -> datetime | None:
    from capture.exports.selection import parse_time

    return None if text is None else parse_time(text)
