"""Feedback demotes only classes known to be harmed, and does not flip at the border."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.orm import sessionmaker

from engine.priorities import ClassAdjustment, Policy, PolicyFile
from evaluation.errors import FeedbackError
from evaluation.feedback import FeedbackRules, Plan, demote, disable, plan, publish, read_policy
from evaluation.judgements import find_run
from evaluation.models import PublishedPolicy
from evaluation.scores import DEFAULT_PRIOR, class_scores, credibility_prior
from tests.evaluation.factory import CLASS, add_run, label

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
HARMED = "beta/chat/-"
MIXED = [-1, 0, 0, 0] * 5


def planned(
    sessions: sessionmaker,
    rules: FeedbackRules = FeedbackRules(),
    current: Policy | None = None,
    now: datetime = NOW,
) -> Plan:
    with sessions() as session:
        return plan(session, find_run(session), rules, current, now)


def harmed_run(sessions: sessionmaker, **kwargs) -> int:
    run_id = add_run(sessions, classes=[HARMED] * 20 + [CLASS] * 40)
    label(sessions, run_id, [-1] * 18 + [0] * 42, **kwargs)
    return run_id


def adjustment(found: Plan, key: str) -> int:
    return found.policy.adjustment(key, NOW)


def test_a_harmed_class_is_demoted_and_others_are_not(sessions: sessionmaker) -> None:
    harmed_run(sessions)
    found = planned(sessions)
    assert -20 <= adjustment(found, HARMED) <= -10
    assert adjustment(found, CLASS) == 0
    assert adjustment(found, "somebody/else/-") == 0
    entry = found.policy.classes[HARMED]
    assert (entry.labels, entry.basis) == (20, "expert")
    assert entry.score < 0.2
    assert entry.upper < 0.5
    assert found.policy.direction == "demote_harmed"


def test_a_new_template_follows_its_demoted_parent(sessions: sessionmaker) -> None:
    harmed_run(sessions)
    assert adjustment(planned(sessions), "beta/chat/12345678") < 0


def test_a_neutral_template_is_shielded_from_its_parent(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=["beta/chat/bad"] * 40 + ["beta/chat/good"] * 12)
    label(sessions, run_id, [-1] * 40 + [0] * 12)
    found = planned(sessions)
    assert adjustment(found, "beta/chat/unknown") < 0
    assert adjustment(found, "beta/chat/good") == 0


def test_too_few_labels_never_demote(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[HARMED] * 12)
    label(sessions, run_id, [-1] * 12)
    assert planned(sessions, FeedbackRules(min_labels=13)).policy.classes == {}
    assert adjustment(planned(sessions, FeedbackRules(min_labels=12)), HARMED) < 0


def test_a_low_score_that_is_not_certain_does_not_demote(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[HARMED] * 20)
    label(sessions, run_id, [-1, 0, 0, 0] * 5)
    found = planned(sessions)
    entry = found.policy.classes[HARMED]
    assert entry.score < 0.5 < entry.upper
    assert entry.adjustment == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["a/x/1", "a/x/2", "a/y/1", "b/x/1"]), st.integers(-1, 1)),
        min_size=1,
        max_size=60,
    )
)
def test_shrunk_scores_lie_between_what_they_are_made_of(verdicts) -> None:
    scores = class_scores(verdicts, 0.95)
    means = [found.mean for found in scores.values()]
    for found in scores.values():
        assert min(0.5, *means) - 1e-9 <= found.score <= max(0.5, *means) + 1e-9
        assert found.mean <= found.upper + 1e-9
        parent = scores.get(found.class_key.rpartition("/")[0])
        if parent is not None:
            between = sorted((found.mean, parent.score))
            assert between[0] - 1e-9 <= found.score <= between[1] + 1e-9
            assert found.labels <= parent.labels


def test_credibility_prior_is_the_ratio_of_variances() -> None:
    rng = np.random.default_rng(5)
    means = rng.normal(0.5, 0.1, 400)
    groups = [rng.normal(mean, 0.3, 25) for mean in means]
    assert credibility_prior(groups) == pytest.approx(0.3**2 / 0.1**2, rel=0.2)
    assert credibility_prior([[0.5, 0.6], [0.6, 0.5]]) == math.inf
    assert credibility_prior([[0.5, 0.6]]) == DEFAULT_PRIOR
    assert credibility_prior([[0.0], [1.0]]) == DEFAULT_PRIOR


@pytest.mark.parametrize(
    ("pattern", "was_demoted", "action"),
    [
        (MIXED, True, "keep demoted"),
        (MIXED, False, "neutral"),
        ([0] * 30, True, "restore"),
        ([-1] * 30, False, "demote"),
        ([-1] * 30, True, "demote"),
    ],
)
def test_hysteresis_against_the_published_policy(
    sessions: sessionmaker, pattern: list[int], was_demoted: bool, action: str
) -> None:
    """The mixed class's upper bound lies between 0.5 and 0.55: it stays what it was."""
    run_id = add_run(sessions, classes=[HARMED] * len(pattern))
    label(sessions, run_id, pattern)
    fresh = planned(sessions)
    if action in ("keep demoted", "neutral"):
        pattern_upper = fresh.policy.classes[HARMED].upper
        assert 0.5 <= pattern_upper <= 0.55
    current = _with_entry(fresh.policy, -5 if was_demoted else 0)
    found = planned(sessions, current=current)
    actions = {entry.score.class_key: entry.action for entry in found.classes}
    assert actions[HARMED] == action
    assert (adjustment(found, HARMED) < 0) == (action in ("keep demoted", "demote"))


@pytest.mark.parametrize("change", ["expired", "other build", "other basis"])
def test_hysteresis_ends_with_the_policy_it_stands_on(sessions: sessionmaker, change: str) -> None:
    run_id = add_run(sessions, classes=[HARMED] * len(MIXED))
    label(sessions, run_id, MIXED)
    current = _with_entry(
        planned(sessions).policy,
        -5,
        basis="machine" if change == "other basis" else "expert",
        new_build="other" if change == "other build" else None,
    )
    now = NOW + timedelta(days=8) if change == "expired" else NOW
    assert planned(sessions, current=current, now=now).policy.classes[HARMED].adjustment == 0


def test_effect_is_bounded_and_proportional(sessions: sessionmaker) -> None:
    harmed_run(sessions)
    small = adjustment(planned(sessions, FeedbackRules(max_effect=4)), HARMED)
    large = adjustment(planned(sessions, FeedbackRules(max_effect=40)), HARMED)
    assert -4 <= small < 0
    assert -40 <= large < small


def test_machine_labels_count_only_on_a_machine_basis_and_say_so(sessions: sessionmaker) -> None:
    harmed_run(sessions, expert="machine:ref", kind="machine")
    with pytest.raises(FeedbackError, match="no expert verdicts"):
        planned(sessions)
    found = planned(sessions, FeedbackRules(basis="machine"))
    assert found.policy.classes[HARMED].basis == "machine"
    assert adjustment(found, HARMED) < 0


def test_only_valid_runs_may_change_priorities(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, status="invalid", reason="too late")
    label(sessions, run_id, [-1] * 10)
    with pytest.raises(FeedbackError, match="run 1 is invalid"):
        planned(sessions)


def test_publishing_writes_what_the_engine_reads_and_keeps_it(
    sessions: sessionmaker, tmp_path: Path
) -> None:
    run_id = harmed_run(sessions)
    path = tmp_path / "policy" / "policy.json"
    found = planned(sessions)
    follower = PolicyFile(path)
    with sessions() as session:
        publish(session, path, found)
        kept = session.scalars(select(PublishedPolicy)).one()
    change = follower.poll(NOW)
    assert change is not None
    assert change.policy == found.policy == read_policy(path)
    assert (kept.run_id, kept.policy_id) == (run_id, found.policy.policy_id)
    assert Policy.from_json(found.policy.to_json()).to_json() == found.policy.to_json()
    assert kept.document["classes"][HARMED]["adjustment"] == adjustment(found, HARMED)


def test_expiry_and_dry_run_adjust_nothing(sessions: sessionmaker) -> None:
    harmed_run(sessions)
    found = planned(sessions, FeedbackRules(lifetime=timedelta(hours=1)))
    assert found.policy.adjustment(HARMED, NOW + timedelta(minutes=59)) < 0
    assert found.policy.adjustment(HARMED, NOW + timedelta(hours=1)) == 0
    dry = planned(sessions, FeedbackRules(dry_run=True)).policy
    assert dry.adjustment(HARMED, NOW) == 0
    assert dry.planned(HARMED) < 0


def test_kill_switch_holds_until_enabled_again(sessions: sessionmaker, tmp_path: Path) -> None:
    harmed_run(sessions)
    path = tmp_path / "policy.json"
    found = planned(sessions)
    with sessions() as session:
        publish(session, path, found)
        stopped = disable(path, NOW)
        assert stopped.adjustment(HARMED, NOW) == 0
        assert read_policy(path) == stopped
        with pytest.raises(FeedbackError, match="--enable"):
            publish(session, path, planned(sessions))
        publish(session, path, planned(sessions), enable=True)
    current = read_policy(path)
    assert current is not None
    assert current.adjustment(HARMED, NOW) < 0


@pytest.mark.parametrize("content", [None, "{broken", "\x00"])
def test_kill_switch_works_without_a_usable_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "policy.json"
    if content is not None:
        path.write_text(content)
    disable(path, NOW)
    current = read_policy(path)
    assert current is not None
    assert not current.enabled


def test_a_policy_that_cannot_be_written_is_not_kept(
    sessions: sessionmaker, tmp_path: Path
) -> None:
    harmed_run(sessions)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with sessions() as session, pytest.raises(FeedbackError, match="cannot write the policy"):
        publish(session, blocked / "policy.json", planned(sessions))
    with sessions() as session:
        assert session.scalars(select(PublishedPolicy)).all() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_labels", 0), ("confidence", 1.0), ("max_effect", 101), ("lifetime", timedelta(0))],
)
def test_rules_out_of_range_are_named(name: str, value) -> None:
    with pytest.raises(FeedbackError, match=name):
        FeedbackRules(**{name: value})


def _with_entry(
    policy: Policy, adjustment: int, *, basis: str = "expert", new_build: str | None = None
) -> Policy:
    entry = ClassAdjustment(adjustment, 30, 0.4, 0.49, basis)
    fields = {**vars(policy), "classes": {HARMED: entry}}
    if new_build is not None:
        fields["new_build"] = new_build
    return Policy(**fields)


def test_an_operator_demotes_a_class_and_all_below_it(
    sessions: sessionmaker, tmp_path: Path
) -> None:
    harmed_run(sessions)
    path = tmp_path / "policy.json"
    with sessions() as session:
        publish(session, path, planned(sessions))
    tenant, neutral = CLASS.partition("/")[0], CLASS
    demote(path, tenant, 30, NOW)
    policy = Policy.from_json(path.read_text())
    assert policy.adjustment(neutral, NOW) == -30
    assert policy.classes[tenant].basis == "operator"
    assert policy.adjustment(HARMED, NOW) < 0
    demote(path, tenant, 0, NOW)
    assert Policy.from_json(path.read_text()).adjustment(neutral, NOW) == 0


def test_an_operator_cannot_demote_past_the_kill_switch_or_the_bounds(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    with pytest.raises(FeedbackError, match="101"):
        demote(path, "a", 101, NOW)
    for key in ("", "  ", "a//b", "a/", "a\x1b[31m"):
        with pytest.raises(FeedbackError, match="is no class"):
            demote(path, key, 5, NOW)
    disable(path, NOW)
    with pytest.raises(FeedbackError, match="disabled"):
        demote(path, "a", 10, NOW)
