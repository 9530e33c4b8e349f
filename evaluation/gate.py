"""The release gate: may the new build of a run replace the old one?

Applies a policy to a run's labels and explains every criterion. Exit codes: 0 pass, 1 fail, 2 not
enough evidence, 3 invalid run. Not for rendering: that is `evaluation.report`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from evaluation import criteria
from evaluation.criteria import ClassResult, Criterion, Outcome
from evaluation.gate_policy import GatePolicy
from evaluation.judgements import (
    ExpertQuality,
    agreement,
    expert_quality,
    judgements,
    noisy_changes,
)
from evaluation.latency import LatencyRatio, latency_ratios
from evaluation.models import Decision
from evaluation.tally import Tally, dispute_numbers, resolve, tally
from replay.database import now
from replay.models import Diff, Run

SEVERITY = (Outcome.INVALID, Outcome.FAIL, Outcome.INSUFFICIENT, Outcome.PASS)
"""Which criterion decides when several do not pass."""


@dataclass(frozen=True)
class GateReport:
    """Everything the gate looked at and decided. `kinds` counts A/B pairs by what differs first;
    `noisy` of them are not judged because the old build does not repeat itself there either.
    `disputes`: their numbers in `inferloop replay show`."""

    run_id: int
    old_build: str
    new_build: str
    traffic_file: str
    traffic_digest: str
    decided_at: datetime
    outcome: Outcome
    criteria: tuple[Criterion, ...]
    classes: tuple[ClassResult, ...]
    tally: Tally
    kinds: dict[str, int]
    noisy: int
    experts: tuple[ExpertQuality, ...]
    agreement: float | None
    disputes: tuple[int, ...]
    latency: tuple[LatencyRatio, ...]
    policy: GatePolicy

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: outcomes by lower-case name, intervals as [lower, upper]."""
        fields = asdict(self) | {"policy": self.policy.model_dump()}
        plain: dict[str, Any] = _plain(fields)
        return {"schema": "inferloop.gate/1", "exit_code": int(self.outcome), **plain}


def evaluate(session: Session, run: Run, policy: GatePolicy) -> GateReport:
    """Apply the policy to the run's labels. Reads only."""
    found = resolve(
        session, run, min_experts=policy.min_experts, accept_machine=policy.accept_machine
    )
    counts = tally(found)
    classes = criteria.class_results(found, policy)
    kinds = _kinds(session, run, "change")
    noise = _kinds(session, run, "noise")
    latency = latency_ratios(run)
    checks = (
        criteria.run_validity(run),
        criteria.noise(sum(noise.values()) - noise.get("same", 0), sum(noise.values()), policy),
        criteria.label_count(counts, sum(kinds.values()), policy),
        criteria.harm_rate(counts, policy),
        criteria.class_harm(classes),
        *criteria.latency(latency, policy),
    )
    return GateReport(
        run_id=run.id,
        old_build=run.name_of("old"),
        new_build=run.name_of("new"),
        traffic_file=run.traffic_file,
        traffic_digest=run.traffic_digest,
        decided_at=now(),
        outcome=min((check.outcome for check in checks), key=SEVERITY.index),
        criteria=checks,
        classes=classes,
        tally=counts,
        kinds=kinds,
        noisy=noisy_changes(session, run),
        experts=tuple(expert_quality(session, run)),
        agreement=agreement(judgements(session, run)),
        disputes=dispute_numbers(session, run, found),
        latency=latency,
        policy=policy,
    )


def record(session: Session, report: GateReport) -> Decision:
    """Keep the decision with its whole report (added to the session, not committed)."""
    decision = Decision(
        run_id=report.run_id, exit_code=int(report.outcome), report=report.to_dict()
    )
    session.add(decision)
    return decision


def _kinds(session: Session, run: Run, pair: str) -> dict[str, int]:
    rows = session.execute(
        select(Diff.kind, func.count())
        .where(Diff.run_id == run.id, Diff.pair == pair)
        .group_by(Diff.kind)
        .order_by(Diff.kind)
    )
    return dict(rows.all())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, datetime):
        return value.isoformat()
    return value
