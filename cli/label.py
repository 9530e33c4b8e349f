"""`inferloop label`: judge what changed, blind, in a terminal; pre-label, list and export."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.main import app

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from evaluation.labels import LabelQueue
    from evaluation.pairs import Answer, Pair
    from evaluation.wording import Span

label_app = typer.Typer(
    no_args_is_help=True,
    help="Judge what a build changed: blind, one verdict per expert and diff."
    "\n\nExample: inferloop label next --expert ann",
)
app.add_typer(label_app, name="label")

Run = Annotated[int | None, typer.Argument(help="number of the run; default: newest valid one")]
Expert = Annotated[
    str | None, typer.Option(help="who judges (created when new); default: your login name")
]
Token = Annotated[str, typer.Argument(help="as given by `inferloop label next --json`")]
KEYS = {"1": "left", "2": "same", "3": "right"}
HELP = "1 left is better   2 no difference   3 right is better   s skip   u undo   q quit"


@label_app.command("next")
def judge(
    run: Run = None,
    expert: Expert = None,
    json: Annotated[
        bool, typer.Option("--json", help="print one pair with its token and stop (for scripts)")
    ] = False,
) -> None:
    """Show two answers blind and take 1, 2 or 3, one pair after the other.

    Example: inferloop label next --expert ann
    """
    queue = _queue(run, expert)
    if json:
        _print_pair(queue)
        return
    undoable: str | None = None
    while (pair := queue.next()) is not None:
        going_on, undoable = _judge_one(queue, pair, undoable)
        if not going_on:
            return
    typer.echo(f"nothing left to judge for {queue.expert} in run {queue.run_id}")


@label_app.command()
def add(
    token: Token,
    verdict: Annotated[str, typer.Argument(help="left, right or same: which is better")],
    expert: Expert = None,
    run: Annotated[
        int | None, typer.Option(help="number of the run; default: newest valid one")
    ] = None,
    comment: Annotated[str | None, typer.Option(help="why")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="correct your earlier verdict, which is kept aside")
    ] = False,
) -> None:
    """Record a verdict on a pair that `label next --json` printed.

    Example: inferloop label add nB3kq0 left --expert ann --comment "the sum is right"
    """
    _queue(run, expert).judge(token, verdict, comment=comment, replace=replace)
    typer.echo("recorded")


@label_app.command("list")
def show(run: Run = None) -> None:
    """Show how far judging is: classes, experts and their false alarms, disputes, machine labels.

    Example: inferloop label list 3
    """
    from rich.console import Console

    from cli.database import open_database
    from evaluation.judgements import agreement, expert_quality, find_run, judgements
    from evaluation.tally import dispute_numbers, resolve, tally

    with open_database()() as session:
        found = find_run(session, run, valid=True)
        entries = resolve(session, found, min_experts=1, accept_machine=False)
        machine = sum(bool(entry.votes) for entry in judgements(session, found, "machine"))
        alpha = agreement(judgements(session, found))
        experts = expert_quality(session, found)
        disputes = dispute_numbers(session, found, entries)
    console = Console()
    counts = tally(entries)
    typer.echo(
        f"run {found.id}: {counts.diffs} diffs to judge, {counts.judged} judged, "
        f"{machine} labelled by machine"
    )
    keys = sorted({entry.class_key for entry in entries})
    rows = [(key, tally(entry for entry in entries if entry.class_key == key)) for key in keys]
    console.print(
        _table(
            ("class", "diffs", "harm", "neutral", "benefit", "disputed"),
            [(key, t.diffs, t.harm, t.neutral, t.benefit, t.disputed) for key, t in rows],
        )
    )
    work = [
        (e.name, e.labels, e.corrected, f"{e.false_alarms} of {e.hidden_pairs}") for e in experts
    ]
    header = ("expert", "labels", "corrected", "false alarms on hidden A/A pairs")
    console.print(_table(header, work))
    if alpha is not None:
        typer.echo(f"agreement (Krippendorff's alpha): {alpha:.2f}")
    if disputes:
        numbers = ", ".join(map(str, disputes))
        typer.echo(f"disputed diffs: {numbers} (`inferloop replay show {found.id} --diff N`)")


@label_app.command()
def prelabel(
    referee: Annotated[
        Path, typer.Option(help="TOML file of the build that scores both answers (float32)")
    ],
    run: Run = None,
    threshold: Annotated[
        float,
        typer.Option(min=0, help="neutral up to this difference, nats a token; A/A may raise it"),
    ] = 0.02,
) -> None:
    """Label all changes by likelihood under a referee build, as a machine, not as an expert.

    Example: inferloop label prelabel 3 --referee float32.toml
    """
    from capture.settings import Settings
    from cli.database import open_database
    from cli.progress import progress_bars
    from evaluation.prelabel import prelabel as score
    from replay.builds import load_build

    spec = load_build(referee)
    with progress_bars() as report:
        found = score(
            open_database(),
            spec,
            run_id=run,
            least_threshold=threshold,
            log=Settings().runs / "referee.log",
            progress=report,
        )
    typer.echo(
        f"machine labels by {found.expert}: {found.harm} harm, {found.neutral} neutral, "
        f"{found.benefit} benefit, {found.unscored} not scored; neutral within "
        f"{found.threshold:.3f} nats a token"
    )
    if found.reason is not None:
        typer.echo(f"why some were not scored: {found.reason}", err=True)


@label_app.command()
def export(
    run: Run = None,
    output: Annotated[Path | None, typer.Option(help="file to write; default: print")] = None,
) -> None:
    """Write all labels and skips of a run as JSON lines, with the side that was hidden and with
    earlier verdicts that were corrected.

    Example: inferloop label export 3 --output labels.jsonl
    """
    from cli.database import open_database
    from evaluation.errors import LabelError
    from evaluation.judgements import export as records
    from evaluation.judgements import find_run

    with open_database()() as session:
        found = find_run(session, run, valid=True)
        lines = [_json(record) for record in records(session, found)]
    if output is None:
        for line in lines:
            typer.echo(line)
        return
    try:
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise LabelError(f"cannot write {output}: {error.strerror}") from error
    typer.echo(f"{len(lines)} labels and skips written to {output}")


def _queue(run: int | None, expert: str | None) -> LabelQueue:
    from cli.database import open_database
    from evaluation.labels import LabelQueue

    return LabelQueue(open_database(), _login_name() if expert is None else expert, run)


def _login_name() -> str:
    from evaluation.errors import LabelError

    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # a container's user without a name
        raise LabelError("you have no login name: say who judges with --expert") from error


def _print_pair(queue: LabelQueue) -> None:
    from dataclasses import asdict

    pair = queue.next()
    typer.echo(_json(None if pair is None else asdict(pair), indent=2))


def _json(value: Any, indent: int | None = None) -> str:
    """JSON that people can read; control characters above ASCII, which JSON allows, are escaped."""
    import json

    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _judge_one(queue: LabelQueue, pair: Pair, undoable: str | None) -> tuple[bool, str | None]:
    """Show the pair and carry out one key: whether to go on, and the token undo applies to."""
    import time

    from rich.console import Console

    console = Console()
    console.print(_render(queue, pair))
    started = time.monotonic()
    while True:
        key = typer.prompt(HELP, prompt_suffix="\n> ").strip().lower()
        if key in KEYS:
            queue.judge(pair.token, KEYS[key], seconds=round(time.monotonic() - started, 1))
        elif key == "s":
            queue.skip(pair.token, typer.prompt("why"))
        elif key == "u" and undoable is not None:
            queue.undo(undoable)
            return True, None
        elif key == "q":
            return False, None
        else:
            typer.echo("nothing to undo yet" if key == "u" else f"{key!r} is not one of the keys")
            continue
        return True, pair.token


def _render(queue: LabelQueue, pair: Pair) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    from evaluation.wording import compare, visible

    progress = queue.progress()
    title = f"{queue.expert}: {progress.judged} judged, {progress.remaining} to go"
    question = Text("\n").join(
        Text.assemble((f"{visible(role)}: ", "bold"), visible(text)) for role, text in pair.question
    )
    left, right = compare(pair.left.text, pair.right.text)
    answers = Table.grid(expand=True)
    answers.add_column(ratio=1)
    answers.add_column(ratio=1)
    answers.add_row(
        Panel(_text(pair.left, left), title="left"), Panel(_text(pair.right, right), title="right")
    )
    return Group(Rule(title), question, answers)


def _text(answer: Answer, spans: list[Span]) -> Text:
    from rich.text import Text

    text = Text()
    for span in spans:
        text.append(span.text, style="bold yellow" if span.changed else "")
    if answer.note is not None:
        text.append(f"\n[{answer.note}]", style="italic dim")
    return text


def _table(header: tuple[str, ...], rows: Sequence[tuple[str | int, ...]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from evaluation.wording import visible

    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    return table
