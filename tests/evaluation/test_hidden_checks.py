"""No number that an expert sees tells a hidden check from another pair."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from evaluation.hidden_checks import CHECK_BLOCK, Block, checks_to_come, places_of_check
from evaluation.labels import LabelQueue
from evaluation.models import Presentation
from replay.models import Diff
from tests.evaluation.factory import CLASS, add_run, label

Sessions = sessionmaker[Session]


def kinds(sessions: Sessions, run_id: int) -> list[str]:
    """What was shown of a run, in order: change or noise."""
    with sessions() as session:
        return list(
            session.scalars(
                select(Diff.pair)
                .join(Presentation, Presentation.diff_id == Diff.id)
                .where(Diff.run_id == run_id)
                .order_by(Presentation.id)
            )
        )


def judge_all(found: LabelQueue) -> list[tuple[int, int]]:
    """Judge what there is; (judged, to go) as shown beside each pair, and after the last."""
    shown = []
    while (pair := found.next()) is not None:
        progress = found.progress()
        shown.append((progress.judged, progress.remaining))
        found.judge(pair.token, "same")
    progress = found.progress()
    return [*shown, (progress.judged, progress.remaining)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("changes", [1, 2, 6, 7, 8, 15])
def test_the_number_to_go_counts_every_pair_down_to_zero(
    sessions: Sessions, changes: int, seed: int
) -> None:
    run_id = add_run(sessions, classes=[CLASS] * changes, unchanged=10, noisy=10)
    shown = judge_all(LabelQueue(sessions, "ann", randomness=random.Random(seed)))
    total = len(shown) - 1
    assert shown == [(done, total - done) for done in range(total + 1)]
    found = kinds(sessions, run_id)
    assert found.count("change") == changes
    assert found.count("noise") == -(-changes // (CHECK_BLOCK - 1))


def test_any_place_may_be_the_checks_the_last_one_too(sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 2, unchanged=10, noisy=10)
    places = set()
    for seed in range(30):
        judge_all(LabelQueue(sessions, f"expert {seed}", randomness=random.Random(seed)))
        places.add(kinds(sessions, run_id)[-3:].index("noise"))
        with sessions() as session:
            for presentation in session.scalars(select(Presentation)):
                session.delete(presentation)
            session.execute(Presentation.metadata.tables["labels"].delete())
            session.commit()
    assert places == {0, 1, 2}


@pytest.mark.parametrize("seed", range(4))
def test_others_votes_do_not_tell_a_check_either(sessions: Sessions, seed: int) -> None:
    """The third vote settles a change; a check is settled by nothing."""
    run_id = add_run(sessions, classes=[CLASS] * 10, unchanged=6, noisy=6)
    for expert in ("bob", "cem"):
        label(sessions, run_id, [0] * 10, expert=expert)
    shown = judge_all(LabelQueue(sessions, "ann", randomness=random.Random(seed)))
    assert shown == [(done, len(shown) - 1 - done) for done in range(len(shown))]


def test_a_block_goes_on_in_the_next_run_and_a_finished_run_stays_finished(
    sessions: Sessions,
) -> None:
    runs = [add_run(sessions, classes=[CLASS] * 3, unchanged=5, noisy=5) for _ in range(4)]
    for run_id in runs:
        judge_all(LabelQueue(sessions, "ann", run_id, randomness=random.Random(run_id)))
        for earlier in runs[: runs.index(run_id) + 1]:
            found = LabelQueue(sessions, "ann", earlier)
            assert found.next() is None
            assert found.progress().remaining == 0
    shown = [kind for run_id in runs for kind in kinds(sessions, run_id)]
    assert shown.count("change") == 12
    assert shown[:CHECK_BLOCK].count("noise") == 1
    assert shown[CHECK_BLOCK:].count("noise") == 1


def test_where_no_check_is_left_none_is_counted(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 9)
    with sessions() as session:
        for diff in session.scalars(select(Diff).where(Diff.pair == "noise")):
            session.delete(diff)
        session.commit()
    shown = judge_all(LabelQueue(sessions, "ann", randomness=random.Random(1)))
    assert shown == [(done, 9 - done) for done in range(10)]


@pytest.mark.parametrize(
    ("block", "changes", "places", "checks"),
    [
        (Block(0, False, False), 0, 0, 0),
        (Block(0, False, False), 1, 2, 1),
        (Block(0, False, False), 7, 8, 1),
        (Block(0, False, False), 8, 8, 2),
        (Block(7, False, True), 20, 1, 4),
        (Block(3, True, True), 5, 0, 0),
        (Block(3, True, True), 6, 0, 1),
        (Block(3, False, True), 0, 1, 1),
        (Block(3, False, False), 0, 0, 0),
    ],
)
def test_a_check_in_each_block(block: Block, changes: int, places: int, checks: int) -> None:
    assert places_of_check(block, changes) == places
    assert checks_to_come(block, changes) == checks
