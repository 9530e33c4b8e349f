"""`inferloop feedback`: turn a run's labels into the engine's priority policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.main import app

if TYPE_CHECKING:
    from engine.priorities import Policy
    from evaluation.feedback import FeedbackRules, Plan
    from evaluation.judgements import Basis

feedback_app = typer.Typer(
    no_args_is_help=True,
    help="Publish which request classes are served later because a build harms them."
    "\n\nExample: inferloop feedback publish --dry-run",
)
app.add_typer(feedback_app, name="feedback")

MAX_DAYS = 366
"""Builds change faster than that: a policy that outlives them all is a mistake."""


@feedback_app.command()
def publish(
    run: Annotated[int | None, typer.Argument(help="number of the run; default: newest")] = None,
    basis: Annotated[
        str, typer.Option(help="whose labels count: expert or machine; stands in the file")
    ] = "expert",
    min_labels: Annotated[int, typer.Option(help="labels a class needs to be judged")] = 10,
    min_experts: Annotated[int, typer.Option(help="votes a diff needs to count")] = 1,
    confidence: Annotated[float, typer.Option(help="of the score's upper bound")] = 0.95,
    max_effect: Annotated[int, typer.Option(help="most priority points a class can lose")] = 20,
    days: Annotated[float, typer.Option(help="until the policy expires")] = 7.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="the engine only says what it would do")
    ] = False,
    enable: Annotated[
        bool, typer.Option("--enable", help="publish although the kill switch is on")
    ] = False,
) -> None:
    """Demote the classes that the new build is known to harm, in the running engine.

    Example: inferloop feedback publish 3 --min-labels 20 --dry-run
    """
    from datetime import timedelta

    from evaluation.errors import FeedbackError
    from evaluation.feedback import FeedbackRules

    if not 0 < days <= MAX_DAYS:
        raise FeedbackError(f"--days is {days:g}, it must be above 0 and at most {MAX_DAYS}")
    rules = FeedbackRules(
        basis=_basis(basis),
        min_labels=min_labels,
        min_experts=min_experts,
        confidence=confidence,
        max_effect=max_effect,
        lifetime=timedelta(days=days),
        dry_run=dry_run,
    )
    _publish(run, rules, enable)


@feedback_app.command()
def show() -> None:
    """Print the policy the engine reads now.

    Example: inferloop feedback show
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from capture.settings import Settings
    from engine.priorities import Policy, PolicyError
    from evaluation.errors import FeedbackError
    from evaluation.wording import visible

    path = Settings().policy_file
    try:
        policy = Policy.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        typer.echo(f"no policy in {path}: no class is adjusted")
        return
    except (OSError, UnicodeDecodeError, PolicyError) as error:
        raise FeedbackError(f"the policy {path} cannot be used: {error}") from error
    typer.echo(_state(policy))
    table = Table("class", "adjustment", "labels", "score", "upper bound", "basis", box=None)
    for key, entry in sorted(policy.classes.items()):
        cells = (
            key,
            f"{entry.adjustment:+d}" if entry.adjustment else "0",
            str(entry.labels),
            f"{entry.score:.3f}",
            f"{entry.upper:.3f}",
            entry.basis,
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    Console().print(table)


@feedback_app.command()
def disable() -> None:
    """Kill switch: no class is adjusted from the engine's next look at the file on.

    Example: inferloop feedback disable
    """
    from capture.settings import Settings
    from evaluation import feedback
    from replay.database import now

    path = Settings().policy_file
    feedback.disable(path, now())
    typer.echo(f"feedback is disabled in {path}; `inferloop feedback publish --enable` ends that")


def _publish(run_id: int | None, rules: FeedbackRules, enable: bool) -> None:
    from capture.settings import Settings
    from cli.database import open_database
    from evaluation import feedback
    from evaluation.judgements import find_run
    from replay.database import now

    path = Settings().policy_file
    with open_database()() as session:
        run = find_run(session, run_id)
        found = feedback.plan(session, run, rules, feedback.read_policy(path), now())
        feedback.publish(session, path, found, enable=enable)
    _show_plan(found)
    typer.echo(f"{_state(found.policy)}; written to {path}")


@feedback_app.command()
def demote(
    class_key: Annotated[str, typer.Argument(help="tenant, tenant/route or tenant/route/template")],
    by: Annotated[int, typer.Option(help="priority points; 0 ends the demotion")] = 20,
) -> None:
    """Demote a class by hand, without labels; the file says that an operator did.

    Holds until the policy expires or is published anew.

    Example: inferloop feedback demote acme/summary --by 10
    """
    from capture.settings import Settings
    from evaluation import feedback
    from replay.database import now

    path = Settings().policy_file
    policy = feedback.demote(path, class_key, by, now())
    typer.echo(f"{_state(policy)}; written to {path}")


def _basis(text: str) -> Basis:
    from evaluation.errors import FeedbackError

    if text == "expert":
        return "expert"
    if text == "machine":
        return "machine"
    raise FeedbackError(f"--basis is {text!r}: use expert or machine")


def _state(policy: Policy) -> str:
    from evaluation.wording import visible
    from replay.database import now

    demoted = sum(entry.adjustment < 0 for entry in policy.classes.values())
    classes = "1 class" if demoted == 1 else f"{demoted} classes"
    until = f"until {policy.expires_at:%Y-%m-%d %H:%M} UTC"
    if not policy.enabled:
        state = "disabled: no class is adjusted"
    elif now() >= policy.expires_at:
        state = f"expired at {policy.expires_at:%Y-%m-%d %H:%M} UTC: no class is adjusted"
    elif policy.dry_run:
        state = f"dry run {until}: {classes} would be demoted"
    else:
        state = f"in force {until}: {classes} demoted by at most {policy.max_effect}"
    return f"policy {visible(policy.policy_id)}, {state}"


def _show_plan(found: Plan) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from evaluation.wording import visible

    heads = ("class", "decision", "adjustment", "labels", "mean", "shrunk score", "upper bound")
    table = Table(*heads, box=None)
    for entry in found.classes:
        cells = (
            entry.score.class_key,
            entry.action,
            f"{entry.adjustment:+d}" if entry.adjustment else "0",
            str(entry.score.labels),
            f"{entry.score.mean:.3f}",
            f"{entry.score.score:.3f}",
            f"{entry.score.upper:.3f}",
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    Console().print(table)
