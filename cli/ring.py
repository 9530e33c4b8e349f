"""`inferloop ring`: which trace rings there are, who reads them, what is in them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.main import app

ring_app = typer.Typer(
    no_args_is_help=True,
    help="Look into the trace rings of engines, running, dead or archived."
    "\n\nExample: inferloop ring inspect",
)
app.add_typer(ring_app, name="ring")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


@ring_app.command("list")
def list_rings(as_json: AsJson = False) -> None:
    """List the rings of this home: whose they are, alive or why not, how full, who reads them.

    Rings of crashed engines that the collector has archived are listed, too.

    Example: inferloop ring list
    """
    from capture.rings.ring_report import summaries
    from capture.settings import Settings
    from cli.ring_view import rings_view
    from cli.screen import show

    settings = Settings()
    found = summaries(settings.rings, archives(settings.home))
    if as_json:
        typer.echo(json.dumps([asdict(summary) for summary in found], indent=2))
    elif found:
        show(rings_view(found))
    else:
        typer.echo(f"no ring in {settings.rings}; `inferloop serve` starts an engine with one")


@ring_app.command("inspect")
def inspect_ring(
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="[ENGINE_ID|PATH]",
            help="Engine id (its first characters will do) or file; default: the engine that runs.",
        ),
    ] = None,
    last: Annotated[
        int,
        typer.Option(
            min=0,
            max=10_000,
            help="Frames to show, newest last, samples of memory and GPU not counted; and the "
            "newest of every kind.",
        ),
    ] = 10,
    raw: Annotated[bool, typer.Option("--raw", help="The last frames, whatever they are.")] = False,
    window: Annotated[
        float, typer.Option(min=0.0, max=60.0, help="Seconds over which rates are measured.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show a ring's header, writer, rates, readers and last frames, and check that nothing is
    missing without being counted. Reads only; works on dead rings and on .ring.zst archives.

    Example: inferloop ring inspect --last 20
    """
    from capture.rings.ring_files import find_ring
    from capture.rings.ring_report import inspect
    from capture.settings import Settings
    from cli.ring_view import as_document, report_view
    from cli.screen import show

    settings = Settings()
    path = find_ring(which, settings.rings, archives(settings.home))
    report = inspect(path, window_s=window, last=last, raw=raw)
    if as_json:
        document: dict[str, Any] = as_document(report)
        typer.echo(json.dumps(document, indent=2))
    else:
        show(report_view(report))


def archives(home: Path) -> Path:
    """Where the collector keeps the rings of crashed engines."""
    return home / "crashes"
