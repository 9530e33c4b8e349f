"""`inferloop replay`: replay traffic through two builds, and look at what changed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli.main import app

Number = Annotated[int | None, typer.Argument(help="number of the run; default: newest")]


class _ReplayGroup(TyperGroup):
    """`inferloop replay --old ...` is short for `inferloop replay run --old ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


replay_app = typer.Typer(
    cls=_ReplayGroup,
    no_args_is_help=True,
    help="Replay traffic through an old and a new build; show what changed."
    "\n\nExample: inferloop replay --old old.toml --new new.toml",
)
app.add_typer(replay_app, name="replay")


@replay_app.command("run")
def run_replay(
    old: Annotated[Path, typer.Option(help="TOML file of the build in use")],
    new: Annotated[Path, typer.Option(help="TOML file of the build that is to replace it")],
    traffic: Annotated[
        Path | None, typer.Option(help="file or directory; default: what was mirrored")
    ] = None,
    speed: Annotated[float, typer.Option(help="2: twice as fast as recorded")] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="only the first so many requests")
    ] = None,
) -> None:
    """Replay traffic through OLD, NEW and OLD again, and compare. `run` may be left out.

    The two OLD passes measure the noise floor: what they differ in is no change.
    Exits with 1 if the run is not valid (too many failures, or requests sent late).

    Example: inferloop replay --old old.toml --new new.toml --traffic traffic.jsonl --speed 2
    """
    from capture.settings import Settings
    from cli.database import open_database
    from cli.progress import progress_bars
    from replay.builds import load_build
    from replay.run import replay

    builds = load_build(old), load_build(new)
    settings = Settings()
    try:
        with progress_bars() as report, _termination_as_interrupt():
            run = replay(
                open_database(),
                old=builds[0],
                new=builds[1],
                traffic=traffic or settings.traffic,
                out_dir=settings.runs,
                speed=speed,
                limit=limit,
                progress=report,
            )
    except KeyboardInterrupt:
        typer.echo("interrupted: builds are stopped, a run that had begun is aborted", err=True)
        raise
    _show_run(run.id, diff=None, diffs=0)
    if run.status != "valid":
        raise typer.Exit(1)


@replay_app.command()
def show(
    run: Number = None,
    diff: Annotated[int | None, typer.Option(min=1, help="the diff with this number")] = None,
    diffs: Annotated[int, typer.Option(min=0, help="the first so many diffs")] = 0,
) -> None:
    """Show a run's figures, or diffs of it side by side.

    Example: inferloop replay show 3 --diff 1
    """
    _show_run(run, diff=diff, diffs=diffs)


@replay_app.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, help="how many of the newest")] = 20,
) -> None:
    """List the newest runs.

    Example: inferloop replay list --limit 5
    """
    from rich.console import Console

    from cli.database import open_database
    from cli.replay_view import runs_table
    from replay.history import recent_runs

    with open_database()() as session:
        runs = recent_runs(session, limit)
        if runs:
            Console().print(runs_table(runs))
        else:
            typer.echo("no run yet: make one with `inferloop replay`", err=True)


def _show_run(run_id: int | None, *, diff: int | None, diffs: int) -> None:
    """Print a run; with `diff` or `diffs` only those diffs of it."""
    from rich.console import Console

    from cli.database import open_database
    from cli.replay_view import diff_view, run_view
    from replay.errors import RunError
    from replay.history import changed_diffs, find_run

    console = Console()
    with open_database()() as session:
        run = find_run(session, run_id)
        changed = changed_diffs(session, run)
        if diff is not None and diff > len(changed):
            raise RunError(f"run {run.id} has {len(changed)} diffs: there is no diff {diff}")
        if diff is None and diffs == 0:
            console.print(run_view(run, changed))
            if run.status == "valid":
                _print_next(run.id, len(changed))
            return
        wanted = range(1, min(diffs, len(changed)) + 1) if diff is None else [diff]
        for number in wanted:
            console.print(diff_view(changed[number - 1], number, len(changed)))
        if not wanted:
            typer.echo(f"nothing changed in run {run.id}")


def _print_next(run_id: int, changed: int) -> None:
    if changed:
        typer.echo(f"next: inferloop replay show {run_id} --diff 1")
        typer.echo(f"      inferloop label next {run_id}")
    else:
        typer.echo(f"next: inferloop gate {run_id}")


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the replay as Ctrl-C does: builds stopped, the run marked as aborted.

    SIGINT gets its usual handler even where a shell made a background command ignore it.
    """
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda *_: signal.raise_signal(signal.SIGINT),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
