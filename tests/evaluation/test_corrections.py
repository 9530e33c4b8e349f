"""A verdict can be corrected: the last one counts, the earlier ones are kept with their times."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

import migrations
from evaluation.errors import LabelError
from evaluation.gate import evaluate
from evaluation.gate_policy import GatePolicy
from evaluation.judgements import expert_quality, export, find_run
from evaluation.labels import LabelQueue
from evaluation.models import Label, PastLabel
from evaluation.report import render_markdown
from replay.database import open_sessions
from tests.evaluation.factory import CLASS, add_run
from tests.migrations.postgres import postgres_server

Sessions = sessionmaker[Session]


@pytest.fixture(params=["sqlite", "postgresql"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sessions]:
    """Sessions on a database of each kind."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sessions")
        return
    with postgres_server() as url:
        migrations.upgrade(url)
        found = open_sessions(url)
        yield found
        found.kw["bind"].dispose()


def a_judged_change(found: LabelQueue) -> tuple[str, str, str]:
    """Judge until a change was called worse; its token, the old build's side and the new one's."""
    while (pair := found.next()) is not None:
        old, new = ("right", "left") if "three" in pair.left.text else ("left", "right")
        is_change = "three" in pair.left.text + pair.right.text
        found.judge(pair.token, old if is_change else "same", comment="first thought")
        if is_change:
            return pair.token, old, new
    raise AssertionError("the run has no change")


def test_the_last_verdict_counts_and_the_earlier_one_is_kept(either: Sessions) -> None:
    run_id = add_run(either, classes=[CLASS] * 3)
    found = LabelQueue(either, "ann", randomness=random.Random(1))
    token, old, new = a_judged_change(found)
    with pytest.raises(LabelError, match=r"has your verdict already.*--replace"):
        found.judge(token, new)
    with either() as session:
        assert evaluate(session, find_run(session), GatePolicy()).tally.harm == 1
    found.judge(token, new, comment="read it again", replace=True)
    with either() as session:
        run = find_run(session)
        report = evaluate(session, run, GatePolicy())
        assert (report.tally.harm, report.tally.benefit, report.tally.judged) == (0, 1, 1)
        (quality,) = expert_quality(session, run)
        assert (quality.labels, quality.corrected) == (1, 1)
        assert "| ann | 1 | 1 |" in render_markdown(report)
        (record,) = [entry for entry in export(session, run) if entry["pair"] == "change"]
        (earlier,) = record["earlier"]
        assert (record["value"], record["comment"]) == (1, "read it again")
        assert (earlier["value"], earlier["comment"]) == (-1, "first thought")
        assert earlier["created_at"] <= earlier["withdrawn_at"] <= record["created_at"]
        past = session.scalars(select(PastLabel)).one()
        assert past.withdrawn_at.utcoffset() is not None
        assert run.id == run_id
    found.judge(token, old, replace=True)
    with either() as session:
        assert session.scalar(select(func.count()).select_from(PastLabel)) == 2
        assert [q.corrected for q in expert_quality(session, find_run(session))] == [1]


def test_the_same_verdict_again_corrects_nothing(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 3)
    found = LabelQueue(sessions, "ann", randomness=random.Random(1))
    token, old, _ = a_judged_change(found)
    found.judge(token, old, comment="first thought", replace=True)
    with sessions() as session:
        assert session.scalars(select(PastLabel)).all() == []


def test_replace_also_takes_a_first_verdict_and_ends_a_skip(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 3)
    found = LabelQueue(sessions, "ann")
    for _ in range(2):
        pair = found.next()
        assert pair is not None
        found.judge(pair.token, "same", replace=True)
    pair = found.next()
    assert pair is not None
    found.skip(pair.token, "not my field")
    found.judge(pair.token, "same", replace=True)
    progress = found.progress()
    assert (progress.judged, progress.skipped) == (3, 0)
    with sessions() as session:
        assert session.scalars(select(PastLabel)).all() == []


def test_what_was_undone_is_kept_too(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 3)
    found = LabelQueue(sessions, "ann", randomness=random.Random(1))
    token, _, new = a_judged_change(found)
    found.undo(token)
    with sessions() as session:
        assert session.scalars(select(PastLabel.value)).all() == [-1]
        assert evaluate(session, find_run(session), GatePolicy()).tally.judged == 0
    found.judge(token, new)
    with sessions() as session:
        assert [quality.corrected for quality in expert_quality(session, find_run(session))] == [1]


def test_nobody_corrects_anothers_verdict(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 3)
    token, _, new = a_judged_change(LabelQueue(sessions, "ann", randomness=random.Random(1)))
    with pytest.raises(LabelError, match="is not a pair shown to bob"):
        LabelQueue(sessions, "bob").judge(token, new, replace=True)


def test_windows_that_correct_at_once_leave_one_verdict_and_lose_none(either: Sessions) -> None:
    add_run(either, classes=[CLASS] * 3)
    token, _, _ = a_judged_change(LabelQueue(either, "ann", randomness=random.Random(1)))
    comments = [f"opinion {number}" for number in range(12)]

    def correct(comment: str) -> None:
        LabelQueue(either, "ann").judge(token, "same", comment=comment, replace=True)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(correct, comment) for comment in comments]:
            done.result(timeout=120)
    with either() as session:
        diff_id = session.scalars(select(PastLabel.diff_id)).first()
        kept = session.scalars(select(PastLabel.comment)).all()
        last = session.scalars(select(Label.comment).where(Label.diff_id == diff_id)).all()
    assert len(last) == 1
    assert sorted([*kept, *last]) == sorted(["first thought", *comments])
