"""Judging is blind, balanced and once per expert; what is shown next follows the rules."""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from evaluation.errors import EvaluationError, LabelError
from evaluation.hidden_checks import CHECK_BLOCK
from evaluation.judgements import (
    Judgement,
    agreement,
    expert_quality,
    export,
    find_run,
    judgements,
    parents,
)
from evaluation.labels import SIDE_BLOCK, LabelQueue
from evaluation.models import Label, Presentation
from evaluation.pairs import Pair
from replay.models import Diff
from tests.evaluation.factory import CLASS, NEW_NAME, OLD_NAME, add_run, label
from tests.waiting import PATIENCE_S

Sessions = sessionmaker[Session]


def queue(sessions: Sessions, expert: str = "ann", seed: int = 1) -> LabelQueue:
    return LabelQueue(sessions, expert, randomness=random.Random(seed))


def judge_all(found: LabelQueue, verdict: str = "same") -> list[str]:
    tokens = []
    while (pair := found.next()) is not None:
        found.judge(pair.token, verdict)
        tokens.append(pair.token)
    return tokens


def next_change(found: LabelQueue) -> Pair:
    """The next pair that is no hidden check; of those, in these runs, both sides are equal."""
    while (pair := found.next()) is not None and pair.left.text == pair.right.text:
        found.judge(pair.token, "same")
    assert pair is not None
    return pair


def shown(sessions: Sessions) -> list[tuple[str, str]]:
    """(pair, new_side) of every presentation, in order."""
    with sessions() as session:
        rows = session.execute(
            select(Diff.pair, Presentation.new_side)
            .join(Presentation, Presentation.diff_id == Diff.id)
            .order_by(Presentation.id)
        )
        return [(pair, side) for pair, side in rows]


def test_a_pair_names_neither_build_nor_side(sessions: Sessions) -> None:
    add_run(sessions)
    pair = queue(sessions).next()
    assert pair is not None
    text = repr(asdict(pair)).lower()
    for secret in (OLD_NAME, NEW_NAME, "old", "new", "noise", "change", "side"):
        assert secret not in text
    assert pair.question == (("user", pair.question[0][1]),)


@pytest.mark.parametrize("seed", range(5))
def test_verdicts_are_mapped_back_through_the_hidden_side(sessions: Sessions, seed: int) -> None:
    add_run(sessions, classes=[CLASS])
    found = queue(sessions, seed=seed)
    pair = next_change(found)
    better = "left" if "three" in pair.left.text else "right"
    found.judge(pair.token, better, comment="  clearer ", seconds=2.5)
    with sessions() as session:
        stored = session.scalars(select(Label).where(Label.comment.is_not(None))).one()
    assert (stored.value, stored.comment, stored.seconds) == (1, "clearer", 2.5)
    assert found.past([pair.token])[0].verdict == better


def test_harm_and_same_are_mapped(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 2)
    found = queue(sessions)
    values = []
    for verdict in ("old side", "same"):
        pair = next_change(found)
        old = "right" if "three" in pair.left.text else "left"
        found.judge(pair.token, old if verdict == "old side" else "same")
        with sessions() as session:
            values.append(session.scalars(select(Label.value).order_by(Label.id.desc())).first())
    assert values == [-1, 0]


def test_each_block_shows_the_new_build_on_both_sides_equally_often(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 3 * SIDE_BLOCK)
    judge_all(queue(sessions))
    sides = [side for pair, side in shown(sessions) if pair == "change"]
    blocks = [sides[i : i + SIDE_BLOCK] for i in range(0, len(sides), SIDE_BLOCK)]
    assert [block.count("left") for block in blocks] == [SIDE_BLOCK // 2] * 3
    assert len({tuple(block) for block in blocks}) > 1


def test_one_hidden_check_per_block_and_false_alarms_are_counted(sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 28, unchanged=10, noisy=10)
    judge_all(queue(sessions, "ann"), "left")
    judge_all(queue(sessions, "bob"), "same")
    pairs = [pair for pair, _ in shown(sessions)][: 4 * CHECK_BLOCK]
    blocks = [pairs[i : i + CHECK_BLOCK] for i in range(0, len(pairs), CHECK_BLOCK)]
    assert [block.count("noise") for block in blocks] == [1] * 4
    with sessions() as session:
        ann, bob = expert_quality(session, find_run(session, run_id))
        votes = judgements(session, find_run(session, run_id))
    assert (ann.name, ann.labels, ann.false_alarms) == ("ann", 28, ann.hidden_pairs)
    assert ann.hidden_pairs >= 4
    assert ann.interval.lower > 0.3
    assert (bob.false_alarms, bob.labels) == (0, 28)
    assert len(votes) == 28


@pytest.mark.parametrize("changes", [1, 7, 8, 20])
def test_the_number_to_go_does_not_give_a_hidden_check_away(
    sessions: Sessions, changes: int
) -> None:
    add_run(sessions, classes=[CLASS] * changes, unchanged=10, noisy=10)
    found = queue(sessions, seed=3)
    totals = []
    while (pair := found.next()) is not None:
        progress = found.progress()
        totals.append(progress.judged + progress.remaining)
        found.judge(pair.token, "same")
    assert len(set(totals)) == 1
    assert totals[0] == len(totals)
    assert found.progress().remaining == 0


def test_identical_pairs_are_the_check_when_no_noise_differs(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * CHECK_BLOCK, noisy=0)
    judge_all(queue(sessions))
    assert [pair for pair, _ in shown(sessions)[:CHECK_BLOCK]].count("noise") == 1


def test_one_label_per_expert_and_diff(sessions: Sessions) -> None:
    add_run(sessions)
    found = queue(sessions)
    pair = found.next()
    assert pair is not None
    found.judge(pair.token, "same")
    with pytest.raises(LabelError, match="undo it first"):
        found.judge(pair.token, "left")
    with pytest.raises(LabelError, match="undo it first"):
        found.skip(pair.token, "unsure")
    with pytest.raises(LabelError, match="is not a pair shown to bob: give the --expert"):
        queue(sessions, "bob").judge(pair.token, "left")


def test_undo_brings_the_same_pair_back_on_the_same_side(sessions: Sessions) -> None:
    add_run(sessions)
    found = queue(sessions)
    first = found.next()
    assert first is not None
    found.judge(first.token, "left")
    assert found.next() != first
    before = found.progress()
    found.undo(first.token)
    assert found.progress().remaining == before.remaining + 1
    assert found.next() == first
    with pytest.raises(LabelError, match="nothing to undo"):
        found.undo(first.token)
    assert found.progress().judged == 0


def test_skipped_pairs_stay_away_with_their_reason(sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS])
    found = queue(sessions)
    pair = next_change(found)
    with pytest.raises(LabelError, match="needs a reason"):
        found.skip(pair.token, "  ")
    found.skip(pair.token, "not my field")
    judge_all(found)
    assert found.progress().skipped == 1
    with sessions() as session:
        records = export(session, find_run(session, run_id))
        (record,) = [entry for entry in records if entry["pair"] == "change"]
    assert (record["skip_reason"], record["value"]) == ("not my field", None)
    found.undo(pair.token)
    assert found.next() == pair


def test_an_open_pair_is_shown_again_rather_than_a_second_one(sessions: Sessions) -> None:
    add_run(sessions)
    assert queue(sessions, seed=1).next() == queue(sessions, seed=2).next()


def test_everyone_judges_the_same_random_order_so_majorities_form(sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 6)
    orders = []
    for expert in ("ann", "bob", "cem"):
        judge_all(queue(sessions, expert), "left")
        with sessions() as session:
            orders.append(
                session.scalars(
                    select(Label.diff_id)
                    .join(Diff, Diff.id == Label.diff_id)
                    .where(Label.expert.has(name=expert), Diff.pair == "change")
                    .order_by(Label.id)
                ).all()
            )
    assert orders[0] == orders[1] == orders[2] != sorted(orders[0])
    assert queue(sessions, "dan").progress().remaining == 0
    with sessions() as session:
        assert all(
            len(found.votes) == 3 for found in judgements(session, find_run(session, run_id))
        )


def test_a_disputed_diff_goes_to_an_adjudicator_first(sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 5)
    for expert, value in (("ann", -1), ("bob", 0), ("cem", 1)):
        label(sessions, run_id, [None, None, value], expert=expert)
    found = queue(sessions, "dan", seed=3)
    pair = found.next()
    assert pair is not None
    if pair.left.text == pair.right.text:  # the hidden check came first
        found.judge(pair.token, "same")
        pair = found.next()
        assert pair is not None
    assert pair.question[0][1] == "Question 2?"


@pytest.mark.parametrize(
    ("votes", "needed", "verdict"),
    [
        ((), 1, None),
        ((-1,), 1, -1),
        ((-1,), 3, None),
        ((-1, -1, 1), 3, -1),
        ((0, 0, 1), 3, 0),
        ((-1, 0, 1), 3, None),
        ((-1, 1), 1, None),
        ((-1, 0, 1, 1), 3, 1),
    ],
)
def test_verdict_is_the_majority_of_enough_experts(votes, needed: int, verdict) -> None:
    judgement = Judgement(1, CLASS, votes)
    assert judgement.verdict(needed) == verdict
    assert judgement.disputed(needed) == (verdict is None and len(votes) >= max(needed, 1))


def test_agreement_of_a_panel(sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 4)
    for expert in ("ann", "bob"):
        label(sessions, run_id, [-1, 0, 1, 1], expert=expert)
    with sessions() as session:
        assert agreement(judgements(session, find_run(session, run_id))) == 1


def test_machine_verdict_is_only_there_after_the_experts_own(sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS])
    label(sessions, run_id, [-1], expert="machine:ref", kind="machine")
    found = queue(sessions)
    pair = next_change(found)
    assert found.past([pair.token]) == []
    found.judge(pair.token, "same")
    (past,) = found.past([pair.token])
    assert past.verdict == "same"
    assert past.machine == ("right" if "three" in pair.left.text else "left")
    with sessions() as session:
        records = export(session, find_run(session, run_id))
        bases = [record["basis"] for record in records if record["pair"] == "change"]
    assert sorted(bases) == ["expert", "machine"]


@pytest.mark.parametrize("name", ["", "   ", "x" * 81, "a\x00b"])
def test_bad_names_are_refused(sessions: Sessions, name: str) -> None:
    add_run(sessions)
    with pytest.raises(LabelError, match="1 to 80"):
        queue(sessions, name)


def test_a_machines_name_cannot_be_used_by_a_person(sessions: Sessions) -> None:
    run_id = add_run(sessions)
    label(sessions, run_id, [0], expert="ref", kind="machine")
    with pytest.raises(LabelError, match="name of a machine"):
        queue(sessions, "ref")
    with pytest.raises(LabelError, match="are for referee builds"):
        queue(sessions, "machine:mine")


def test_missing_runs_are_named(sessions: Sessions) -> None:
    with pytest.raises(EvaluationError, match="no run yet"):
        queue(sessions)
    add_run(sessions)
    with pytest.raises(EvaluationError, match="there is no run 99"):
        LabelQueue(sessions, "ann", 99)


def test_unknown_verdicts_and_endless_comments_are_refused(sessions: Sessions) -> None:
    add_run(sessions)
    found = queue(sessions)
    pair = found.next()
    assert pair is not None
    with pytest.raises(LabelError, match="use left, right or same"):
        found.judge(pair.token, "better")
    with pytest.raises(LabelError, match="at most 4000"):
        found.judge(pair.token, "left", comment="x" * 4001)


def test_several_windows_and_experts_at_once_label_each_diff_once(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 24, unchanged=6, noisy=6)

    def work(expert: str) -> None:
        found = LabelQueue(sessions, expert)
        while (pair := found.next()) is not None:
            with contextlib.suppress(LabelError):  # the other window was faster
                found.judge(pair.token, "left")

    experts = ["ann", "ann", "bob", "bob", "cem"]
    with ThreadPoolExecutor(len(experts)) as pool:
        for done in [pool.submit(work, expert) for expert in experts]:
            done.result(PATIENCE_S)
    with sessions() as session:
        found = judgements(session, find_run(session))
        assert all(len(judgement.votes) == 3 for judgement in found)
        labels = session.execute(select(Label.diff_id, Label.expert_id)).all()
    assert len(labels) == len(set(labels))


def test_a_name_is_one_expert_however_it_is_typed(sessions: Sessions) -> None:
    add_run(sessions)
    names = {queue(sessions, name).expert for name in ("Zoë  B", " Zoe\u0308 B ")}
    assert names == {"Zoë B"}
    for name in ("", "  ", "a\x1b[31m", "a\u200bb", "x" * 81):
        with pytest.raises(LabelError, match="1 to 80 printable"):
            queue(sessions, name)


def test_a_token_is_no_option_of_a_command_line(sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 3)
    assert all(token.isalnum() for token in judge_all(queue(sessions)))


def test_parents_of_a_class() -> None:
    assert parents("acme/chat/1a2b") == ["acme/chat/1a2b", "acme/chat", "acme"]
