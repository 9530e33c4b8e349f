"""What a release engineer meets in CI around the gate: runs that did not end, policies that cannot
be met, disputes that must be found again, labels of the run that people judged."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy.orm import Session, sessionmaker

import cli.label  # noqa: F401 - registers its commands
from cli.main import run as run_command
from evaluation.criteria import Outcome
from evaluation.errors import FeedbackError, GateError
from evaluation.feedback import FeedbackRules
from evaluation.gate import evaluate
from evaluation.gate_policy import GatePolicy
from evaluation.judgements import find_run
from evaluation.report import render_markdown
from replay.history import changed_diffs
from replay.models import Diff, Run
from replay.run import _process_start
from tests.evaluation.factory import CLASS, add_run, label

Sessions = sessionmaker[Session]


@pytest.fixture
def inferloop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a command and returns what it printed."""
    monkeypatch.setenv("INFERLOOP_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["inferloop", *arguments])
        with contextlib.suppress(SystemExit):
            run_command()
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize(
    ("alive", "status", "why"),
    [
        (True, "running", "the replay has not ended: decide when it has"),
        (False, "killed while running", "it did not finish: replay again"),
    ],
)
def test_a_run_that_has_not_ended_is_told_from_one_that_was_killed(
    sessions: Sessions, alive: bool, status: str, why: str
) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60, status="running")
    pid = os.getpid()
    started = _process_start(pid) if alive else -1
    process = {"host": socket.gethostname(), "pid": pid, "started": started}
    with sessions() as session:
        session.get_one(Run, run_id).summary = {"process": process}
        session.commit()
        report = evaluate(session, find_run(session), GatePolicy())
    validity = report.criteria[0]
    assert report.outcome is validity.outcome is Outcome.INVALID
    assert (validity.value, validity.explanation) == (status, why)


def test_more_votes_than_a_panel_gives_are_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text("[gate]\nmin_experts = 4\n")
    with pytest.raises(GateError, match=r"min_experts = 4: .* 3"):
        GatePolicy.load(path)
    with pytest.raises(FeedbackError, match="min_experts is 4, it must be 1 to 3"):
        FeedbackRules(min_experts=4)


def test_disputes_are_named_as_replay_show_numbers_them(
    sessions: Sessions, inferloop: Callable[..., str]
) -> None:
    add_run(sessions, classes=[CLASS] * 7)
    run_id = add_run(sessions, classes=[CLASS] * 6)
    with sessions() as session:
        margins = (0.1, 0.6, 0.3, 0.2, 0.5, 0.4)
        diffs = session.query(Diff).filter_by(run_id=run_id, pair="change").order_by(Diff.id)
        for diff, margin in zip(diffs, margins, strict=True):
            diff.margin = margin
        session.commit()
    label(sessions, run_id, [-1, -1], expert="ann")
    label(sessions, run_id, [1, 1], expert="bob")
    with sessions() as session:
        run = find_run(session, run_id)
        report = evaluate(session, run, GatePolicy())
        named = [changed_diffs(session, run)[number - 1].margin for number in report.disputes]
    assert sorted(named) == [0.1, 0.6]
    assert report.disputes == (1, 6)
    assert f"1, 6 (`inferloop replay show {run_id} --diff N`)" in render_markdown(report)
    assert f"1, 6 (`inferloop replay show {run_id} --diff N`)" in inferloop("label", "list")


def test_labels_are_those_of_the_run_that_is_judged(
    sessions: Sessions, inferloop: Callable[..., str]
) -> None:
    """An aborted replay after the one that people judge does not hide their labels."""
    run_id = add_run(sessions, classes=[CLASS] * 3)
    label(sessions, run_id, [0, 0, 0])
    label(sessions, run_id, [0], expert="machine:ref", kind="machine")
    add_run(sessions, classes=[], status="aborted")
    assert f"run {run_id}: 3 diffs to judge, 3 judged" in inferloop("label", "list")
    assert f'"run": {run_id}' in inferloop("label", "export")
