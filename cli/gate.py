"""`inferloop gate`: decide whether a run's new build may be released."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import TyperException
from typer.core import TyperCommand

from cli.main import app

if TYPE_CHECKING:
    from evaluation.gate import GateReport
    from evaluation.gate_policy import GatePolicy

BROKEN = 3
"""Exit code when the gate could not decide: 1 and 2 are decisions about the release."""


class _GateCommand(TyperCommand):
    """Nothing but a decision may end like one: usage errors end with 2 otherwise, others with 1."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except TyperException as error:
            vars(error)["exit_code"] = BROKEN
            raise

    def invoke(self, ctx: Any) -> Any:
        from evaluation.errors import GateError

        try:
            return super().invoke(ctx)
        except (GateError, typer.Exit, typer.Abort):
            raise
        except Exception as error:
            kind = "" if hasattr(error, "exit_code") else f"{type(error).__name__}: "
            raise GateError(kind + " ".join(str(error).split())) from error


@app.command(cls=_GateCommand)
def gate(
    run: Annotated[int | None, typer.Argument(help="number of the run; default: newest")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="TOML file with the table \\[gate]; default: built in")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="write the report as Markdown")] = None,
    junit: Annotated[Path | None, typer.Option(help="write the report as JUnit XML")] = None,
    json: Annotated[Path | None, typer.Option(help="write the report as JSON")] = None,
) -> None:
    """Decide on a run by its expert labels. The exit code is the decision:
    0 pass, 1 fail, 2 not enough evidence, 3 invalid run (or the gate could not decide).

    Example: inferloop gate 3 --policy gate.toml --markdown gate.md --junit gate.xml
    """
    from evaluation.gate_policy import GatePolicy
    from evaluation.report import render_json, render_junit, render_markdown

    report = _decide(run, GatePolicy() if policy is None else GatePolicy.load(policy))
    for path, render in ((markdown, render_markdown), (junit, render_junit), (json, render_json)):
        if path is not None:
            _write(path, render(report))
    with suppress(SystemExit):  # how rich ends a command whose output nobody reads any more
        _show(report)
    raise typer.Exit(int(report.outcome))


def _decide(run_id: int | None, policy: GatePolicy) -> GateReport:
    from cli.database import open_database
    from evaluation.gate import evaluate, record
    from evaluation.judgements import find_run

    with open_database()() as session:
        report = evaluate(session, find_run(session, run_id), policy)
        record(session, report)
        session.commit()
        return report


def _write(path: Path, text: str) -> None:
    from evaluation.errors import GateError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GateError(f"cannot write the report {path}: {error.strerror}") from error


def _show(report: GateReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from evaluation.criteria import Outcome
    from evaluation.report import TITLES
    from evaluation.wording import visible

    colours = {
        Outcome.PASS: "green",
        Outcome.FAIL: "red",
        Outcome.INSUFFICIENT: "yellow",
        Outcome.INVALID: "magenta",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for item in report.criteria:
        table.add_row(
            Text(TITLES[item.outcome].lower(), style=colours[item.outcome]),
            Text(item.name, style="bold"),
            Text(visible(f"{item.value} (required: {item.bound}); {item.explanation}")),
        )
    console = Console()
    builds = visible(f"{report.old_build} -> {report.new_build}")
    console.print(Text(f"run {report.run_id}: {builds}", style="bold"))
    console.print(table)
    console.print(
        Text(
            f"{TITLES[report.outcome]} (exit code {int(report.outcome)})",
            style=f"bold {colours[report.outcome]}",
        )
    )
