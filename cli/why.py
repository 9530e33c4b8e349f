"""`inferloop why`: the causes of a request's slow moments, or those of the slowest requests."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from capture.why.lookup import Ranking
from cli.main import app

if TYPE_CHECKING:
    import duckdb

    from capture.settings import Settings
    from capture.why.lookup import Subject
    from capture.why.report import Explanation

MOST_REPORTS = 10


@app.command()
def why(
    request: Annotated[
        str | None,
        typer.Argument(help="X-Request-Id, the answer's id, or its first 8 hex digits."),
    ] = None,
    slowest: Annotated[
        int | None, typer.Option(min=1, max=100, help="Explain the N slowest requests.")
    ] = None,
    by: Annotated[
        Ranking, typer.Option(help="With --slowest: by duration, first token, or longest gap.")
    ] = Ranking.duration,
    since: Annotated[
        str | None, typer.Option(help="With --slowest: arrived since then (10m, 2h, a date).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a request.")] = False,
) -> None:
    """Say why a request was slow: its first token, its slow gaps, its sending.

    Each gets the cause that explains most of it, with the figures and the
    requests behind it. The causes and what to do about them: docs/why.md.

    Example:  inferloop why chatcmpl-4bf92f3577b34da6a3ce929d0e0e4736

    Example:  inferloop why --slowest 3 --by ttft --since 10m
    """
    if (request is None) == (slowest is None):
        raise typer.BadParameter("give a request id or --slowest N")
    if slowest is None and (since is not None or by is not Ranking.duration):
        raise typer.BadParameter("--by and --since choose among --slowest N")
    from capture.lake import open_connection
    from capture.settings import Settings
    from capture.why.report import explain

    settings = Settings()
    with open_connection(settings) as lake:
        if request is not None:
            subjects = _asked(lake, request, settings)
        else:
            subjects = _slowest(lake, slowest or 1, by, since)
        explanations = explain(lake, subjects)
    if as_json:
        from capture.why.report import as_json as explanation_json

        for explanation in explanations:
            typer.echo(json.dumps(explanation_json(explanation)))
        return
    from rich.console import Console
    from rich.rule import Rule

    from capture.why.report import render

    console = Console(highlight=False)
    shown = explanations if request is None else _slowest_of(explanations)
    for number, explanation in enumerate(shown):
        if number:
            console.print(Rule(style="dim"))
        console.print(render(explanation))
    if len(shown) < len(explanations):
        console.print(
            f"\nthe slowest {len(shown)} of {len(explanations):,} requests under this id: "
            "--json has all"
        )


def _slowest_of(explanations: list[Explanation]) -> list[Explanation]:
    """Those to show of many under one id (a session that sends one `traceparent`), as they came;
    one that still runs is slower than any that has ended."""
    durations = [one.subject.duration_ms for one in explanations]
    slowness = [math.inf if ms is None else ms for ms in durations]
    slowest = sorted(range(len(slowness)), key=slowness.__getitem__)[-MOST_REPORTS:]
    return [explanations[index] for index in sorted(slowest)]


def _asked(lake: duckdb.DuckDBPyConnection, text: str, settings: Settings) -> list[Subject]:
    """The request; several only when a client sent them under one id."""
    from capture.why.lookup import ambiguous, find, unknown

    subjects = find(lake, text)
    if not subjects:
        raise unknown(lake, text, settings.rings)
    if len({subject.request_id for subject in subjects}) > 1:
        raise ambiguous(text, subjects)
    return subjects


def _slowest(
    lake: duckdb.DuckDBPyConnection, count: int, by: Ranking, since: str | None
) -> list[Subject]:
    from datetime import UTC, datetime

    from capture.why.lookup import WhyError, parse_since, slowest

    now = datetime.now(UTC).replace(tzinfo=None)
    start = None if since is None else parse_since(since, now)
    subjects = slowest(lake, count, by=by, since=start)
    if not subjects:
        when = "" if start is None else f" since {start:%Y-%m-%d %H:%M:%S} UTC"
        raise WhyError(f"no request{when} has a {by.value} yet: is `inferloop collect` running?")
    return subjects
