"""`inferloop top`: what the engines of this machine do, live in the terminal."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from cli.main import app

if TYPE_CHECKING:
    from capture.watch import Watch

READING_SHARE = 0.7  # of the interval; the rest is for drawing
POLLS = 4  # in an interval


class TopError(Exception):
    """The options do not fit together."""

    exit_code = 1


@app.command()
def top(
    interval: Annotated[
        float, typer.Option(min=0.1, max=60.0, help="Seconds between two pictures.")
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print one picture and end; so does a pipe or a dumb terminal."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: one JSON document.")
    ] = False,
) -> None:
    """Watch the running engines: rates, latencies, queue, KV cache, tenants, losses, devices.

    Reads the trace rings themselves, so it needs no collector. Figures are of
    the last 10 seconds; percentiles come from every token, not from buckets.
    Ctrl-C ends it.

    Example: inferloop top

    Example: inferloop top --once --json
    """
    from capture.settings import Settings
    from capture.watch import Watch

    if as_json and not once:
        raise TopError("--json is for one picture: add --once")
    with Watch(Settings().rings) as watch:
        if once or not _can_redraw():
            _print_once(watch, as_json=as_json)
            return
        with suppress(KeyboardInterrupt):
            _run(watch, interval)


def _can_redraw() -> bool:
    """Whether there is a terminal, and one that can move its cursor."""
    from rich.console import Console

    return sys.stdout.isatty() and not Console().is_dumb_terminal


def _print_once(watch: Watch, *, as_json: bool) -> None:
    """The rings hold the last seconds already: nothing has to be waited for."""
    from cli.screen import show
    from cli.top_view import as_document, watch_view

    watch.poll(budget_s=1.0)
    view = watch.view()
    if as_json:
        typer.echo(json.dumps(as_document(view), indent=2))
    else:
        show(watch_view(view))


def _run(watch: Watch, interval_s: float) -> None:
    """Draw until Ctrl-C. Rings are read more often than drawn, so that small ones are kept up."""
    from rich.console import Console
    from rich.live import Live

    from cli.top_view import watch_view

    pause_s = interval_s / POLLS
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            watch.poll(pause_s * READING_SHARE)
            live.update(watch_view(watch.view(), rows=console.height), refresh=True)
            for _ in range(POLLS - 1):
                time.sleep(pause_s * (1 - READING_SHARE))
                watch.poll(pause_s * READING_SHARE)
            time.sleep(pause_s * (1 - READING_SHARE))
