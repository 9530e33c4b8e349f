"""`inferloop mark`: a note of the operator in the trace of running engines."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.main import app


@app.command()
def mark(
    text: Annotated[str, typer.Argument(help="what happened, on one line")],
    url: Annotated[
        list[str] | None,
        typer.Option(help="an engine's address; repeat it for several engines"),
    ] = None,
) -> None:
    """Set a mark in the trace: it shows in the lake's table marks and beside the latencies.

    Example:  inferloop mark "deploy 7" --url http://127.0.0.1:8000
    """
    from capture.marks import MarkError, set_mark

    failures = []
    for address in url or ["http://127.0.0.1:8000"]:
        try:
            set_mark(address, text)
        except MarkError as error:
            failures.append(str(error))
        else:
            typer.echo(f"marked {address}")
    if failures:
        raise MarkError("; ".join(failures))
