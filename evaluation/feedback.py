"""From scores to the policy file: which request classes the engine serves later.

A class is demoted only when it is known to be harmed and restored only when that is clearly over,
so labels at the border do not make it flip. Not for what a demotion does: that is the scheduler's.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from sqlalchemy.orm import Session

from engine.priorities import ClassAdjustment, Policy, PolicyError, write_policy
from evaluation.errors import FeedbackError
from evaluation.judgements import PANEL, Basis, judgements
from evaluation.models import PublishedPolicy
from evaluation.scores import NEUTRAL, ClassScore, class_scores
from replay.models import Run

RESTORE_ABOVE = 0.55
"""A demoted class stays so until its upper bound passes this; others are demoted below 0.5."""

Action = Literal["demote", "keep demoted", "restore", "neutral", "too few labels"]


@dataclass(frozen=True)
class FeedbackRules:
    """What it takes to demote a class, and how much and how long."""

    basis: Basis = "expert"
    min_labels: int = 10
    min_experts: int = 1
    confidence: float = 0.95
    max_effect: int = 20
    lifetime: timedelta = timedelta(days=7)
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, value, valid, allowed in (
            ("min_labels", self.min_labels, self.min_labels >= 1, "at least 1"),
            ("min_experts", self.min_experts, 1 <= self.min_experts <= PANEL, f"1 to {PANEL}"),
            ("confidence", self.confidence, 0.5 < self.confidence < 1, "between 0.5 and 1"),
            ("max_effect", self.max_effect, 1 <= self.max_effect <= 100, "within 1..100"),
            ("lifetime", self.lifetime, self.lifetime > timedelta(0), "positive"),
        ):
            if not valid:
                raise FeedbackError(f"{name} is {value}, it must be {allowed}")


@dataclass(frozen=True)
class PlannedClass:
    """What happens to one class, and the score it follows from."""

    action: Action
    adjustment: int
    score: ClassScore


@dataclass(frozen=True)
class Plan:
    """A policy ready to be published, with the reasons class by class."""

    run_id: int
    policy: Policy
    classes: tuple[PlannedClass, ...]


def plan(
    session: Session, run: Run, rules: FeedbackRules, current: Policy | None, now: datetime
) -> Plan:
    """Turn the run's labels into a policy. Reads only; raises FeedbackError for an invalid run.

    Classes with enough labels are in the policy, at 0 when neutral, which shields them from their
    parent's demotion; classes with too few follow their parent. `current` is the policy in the
    file: a class it demotes for the same builds and basis stays demoted until clearly restored.
    """
    if run.status != "valid":
        raise FeedbackError(
            f"run {run.id} is {run.status} ({run.reason or 'no reason recorded'}): "
            "only a valid run may change priorities"
        )
    needed = rules.min_experts if rules.basis == "expert" else 1
    verdicts = [
        (found.class_key, verdict)
        for found in judgements(session, run, rules.basis)
        if (verdict := found.verdict(needed)) is not None
    ]
    if not verdicts:
        raise FeedbackError(
            f"run {run.id} has no {rules.basis} verdicts: label it first (`inferloop label next`)"
        )
    demoted = _demoted(current, run, rules, now)
    classes = tuple(
        _plan_class(score, rules, score.class_key in demoted)
        for score in class_scores(verdicts, rules.confidence).values()
    )
    return Plan(run.id, _policy(run, rules, classes, now), classes)


def read_policy(path: Path) -> Policy | None:
    """The policy in the file; None when there is no file or it cannot be used (the engine then
    treats it as neutral too)."""
    try:
        return Policy.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PolicyError):
        return None


def publish(session: Session, path: Path, found: Plan, *, enable: bool = False) -> None:
    """Write the policy file atomically and keep the policy in the database (commits).

    Refuses while the kill switch is on, unless `enable`. Raises FeedbackError.
    """
    current = read_policy(path)
    if current is not None and not current.enabled and not enable:
        raise FeedbackError(
            f"feedback is disabled in {path}: publish with --enable to turn it on again"
        )
    session.add(
        PublishedPolicy(
            policy_id=found.policy.policy_id,
            run_id=found.run_id,
            document=json.loads(found.policy.to_json()),
        )
    )
    session.flush()
    _write(path, found.policy)
    session.commit()


def disable(path: Path, now: datetime) -> Policy:
    """Kill switch: the engine adjusts nothing from its next poll on, and publishing is refused.

    Works with any file, also a broken or missing one. Returns what was written.
    """
    current = read_policy(path) or _empty_policy("disabled", now)
    stopped = replace(current, enabled=False)
    _write(path, stopped)
    return stopped


def demote(path: Path, class_key: str, points: int, now: datetime) -> Policy:
    """An operator's decision: serve `class_key` later by `points` (0: no longer), whatever labels
    say, until the policy in the file expires or is published anew. Returns what was written.

    Raises FeedbackError while the kill switch is on, for points outside 0..100 and for a key that
    no request can have.
    """
    parts = class_key.split("/")
    if not class_key.isprintable() or not all(part.strip() for part in parts):
        raise FeedbackError(f"{class_key!r} is no class: give tenant[/route[/template]]")
    if not 0 <= points <= 100:
        raise FeedbackError(f"{points} points is outside 0..100")
    current = read_policy(path)
    if current is None or now >= current.expires_at:
        current = _empty_policy("operator", now)
    if not current.enabled:
        raise FeedbackError(f"feedback is disabled in {path}: publish with --enable first")
    others = {
        key: entry
        for key, entry in current.classes.items()
        if not key.startswith(f"{class_key}/")  # more specific ones would win over the decision
    }
    decision = ClassAdjustment(
        adjustment=-points, labels=0, score=NEUTRAL, upper=1.0, basis="operator"
    )
    changed = replace(
        current,
        policy_id=_policy_id("operator", now),
        max_effect=max(current.max_effect, points),
        classes={**others, class_key: decision},
    )
    _write(path, changed)
    return changed


def _empty_policy(stem: str, now: datetime) -> Policy:
    return Policy(
        policy_id=_policy_id(stem, now),
        created_at=now,
        expires_at=now + FeedbackRules().lifetime,
        direction="demote_harmed",
        enabled=True,
        dry_run=False,
        max_effect=0,
        old_build="",
        new_build="",
        classes={},
    )


def _plan_class(score: ClassScore, rules: FeedbackRules, was_demoted: bool) -> PlannedClass:
    if score.labels < rules.min_labels:
        return PlannedClass("too few labels", 0, score)
    if score.upper < NEUTRAL:
        return PlannedClass("demote", _effect(score, rules), score)
    if was_demoted and score.upper <= RESTORE_ABOVE:
        return PlannedClass("keep demoted", _effect(score, rules), score)
    return PlannedClass("restore" if was_demoted else "neutral", 0, score)


def _effect(score: ClassScore, rules: FeedbackRules) -> int:
    """-1 for a score near 0.5 down to -max_effect for a score of 0."""
    share = max(0.0, (NEUTRAL - score.score) / NEUTRAL)
    return -max(1, round(rules.max_effect * share))


def _demoted(
    current: Policy | None, run: Run, rules: FeedbackRules, now: datetime
) -> frozenset[str]:
    """Classes that the current policy demotes, if it still speaks about the same change."""
    if current is None or now >= current.expires_at:
        return frozenset()
    if (current.old_build, current.new_build) != (
        run.old_build.fingerprint,
        run.new_build.fingerprint,
    ):
        return frozenset()
    return frozenset(
        key
        for key, entry in current.classes.items()
        if entry.adjustment < 0 and entry.basis == rules.basis
    )


def _policy(
    run: Run, rules: FeedbackRules, classes: tuple[PlannedClass, ...], now: datetime
) -> Policy:
    return Policy(
        policy_id=_policy_id(f"run{run.id}", now),
        created_at=now,
        expires_at=now + rules.lifetime,
        direction="demote_harmed",
        enabled=True,
        dry_run=rules.dry_run,
        max_effect=rules.max_effect,
        old_build=run.old_build.fingerprint,
        new_build=run.new_build.fingerprint,
        classes={
            found.score.class_key: ClassAdjustment(
                adjustment=found.adjustment,
                labels=found.score.labels,
                score=round(found.score.score, 4),
                upper=round(found.score.upper, 4),
                basis=rules.basis,
            )
            for found in classes
            if found.action != "too few labels"
        },
    )


def _policy_id(stem: str, now: datetime) -> str:
    return f"{stem}-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def _write(path: Path, policy: Policy) -> None:
    try:
        write_policy(path, policy)
    except OSError as error:
        raise FeedbackError(f"cannot write the policy {path}: {error.strerror}") from error
