"""What the labels of a run amount to: one verdict per diff, and how far experts can be trusted.

Read-only. Judged are changes that a person can see, answers whose text (or failure) differs, of
requests that the old build answers the same way twice: what A/A shows too is no change.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session, aliased

from evaluation.agreement import krippendorff_alpha
from evaluation.errors import EvaluationError
from evaluation.models import Expert, Label, PastLabel, Presentation
from evaluation.statistics import Interval, clopper_pearson
from replay.models import Diff, ReplayedRequest, Run

Basis = Literal["expert", "machine"]

PANEL = 3
"""Experts who judge each diff before it counts as settled by majority."""


@dataclass(frozen=True)
class Judgement:
    """The verdicts on one diff: -1 the new build harms, 0 neutral, +1 it helps."""

    diff_id: int
    class_key: str
    votes: tuple[int, ...]

    def verdict(self, min_experts: int = 1) -> int | None:
        """The most frequent vote; None with fewer than `min_experts` votes or a tie.

        Of three votes that is the majority. A tie is a disagreement, which one more expert (the
        adjudicator) can break.
        """
        if not self.votes or len(self.votes) < min_experts:
            return None
        ranked = Counter(self.votes).most_common(2)
        if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
            return None
        return ranked[0][0]

    def disputed(self, min_experts: int = 1) -> bool:
        """Whether enough experts voted and they do not agree on anything."""
        return len(self.votes) >= max(min_experts, 1) and self.verdict(min_experts) is None


@dataclass(frozen=True)
class ExpertQuality:
    """An expert's work on a run. On a hidden A/A pair every verdict but "same" is a false alarm.
    `corrected`: pairs on which an earlier verdict was replaced or taken back."""

    name: str
    labels: int
    corrected: int
    hidden_pairs: int
    false_alarms: int
    interval: Interval


def find_run(session: Session, run_id: int | None = None, *, valid: bool = False) -> Run:
    """The run with that number, or the newest one (`valid`: the newest valid one, if any).

    Raises EvaluationError when there is none.
    """
    if run_id is not None:
        run = session.get(Run, run_id)
        if run is None:
            raise EvaluationError(
                f"there is no run {run_id}: `inferloop replay list` shows those that exist"
            )
        return run
    newest_first = select(Run).order_by(Run.id.desc()).limit(1)
    newest = session.scalar(newest_first.where(Run.status == "valid")) if valid else None
    newest = newest or session.scalar(newest_first)
    if newest is None:
        raise EvaluationError("no run yet: make one with `inferloop replay`")
    return newest


def judgements(session: Session, run: Run, basis: Basis = "expert") -> list[Judgement]:
    """All diffs of the run that can be judged, with the votes so far, in labelling order.

    The order is random but fixed per run, so the diffs labelled so far are always a uniform
    random sample of the run's and a rate over them is not biased by who stopped when.
    """
    votes = _votes(session, run, basis)
    rows = session.execute(select(Diff.id, Diff.class_key).where(*judgeable(run)))
    found = [Judgement(diff_id, key, tuple(votes.get(diff_id, ()))) for diff_id, key in rows]
    return sorted(found, key=lambda judgement: shuffle_key(run, judgement.diff_id))


def judgeable(run: Run) -> tuple[ColumnElement[bool], ...]:
    """Conditions for `select(Diff...)`: the run's changes that can be judged."""
    return *_differing(run, "change"), ~_repeat_differs(run)


def visible_noise(run: Run) -> tuple[ColumnElement[bool], ...]:
    """Conditions for `select(Diff...)`: the run's A/A pairs that a reader can tell apart."""
    return _differing(run, "noise")


def noisy_changes(session: Session, run: Run) -> int:
    """Changes that are not judged because the old build differs from itself there too."""
    count = select(func.count()).select_from(Diff)
    found = session.scalar(count.where(*_differing(run, "change"), _repeat_differs(run)))
    return found or 0


def shuffle_key(run: Run, diff_id: int) -> bytes:
    """Sorts diffs at random, the same way for everybody who judges this run."""
    seed = f"{run.id}/{run.traffic_digest}/{diff_id}".encode()
    return hashlib.blake2s(seed, digest_size=8).digest()


def expert_quality(session: Session, run: Run) -> list[ExpertQuality]:
    """Every expert who judged anything in the run, by name, with their false alarms."""
    rows = session.execute(
        select(Expert.name, Diff.pair, Label.value)
        .join(Label, Label.expert_id == Expert.id)
        .join(Diff, Diff.id == Label.diff_id)
        .where(Diff.run_id == run.id, Expert.kind == "expert")
    )
    corrected = dict(
        session.execute(
            select(Expert.name, func.count(PastLabel.diff_id.distinct()))
            .join(PastLabel, PastLabel.expert_id == Expert.id)
            .join(Diff, Diff.id == PastLabel.diff_id)
            .where(Diff.run_id == run.id)
            .group_by(Expert.name)
        ).all()
    )
    labels: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    for name, pair, value in rows:
        labels[name] += pair == "change"
        hidden[name] += pair == "noise"
        alarms[name] += pair == "noise" and value != 0
    return [
        ExpertQuality(
            name,
            labels[name],
            corrected.get(name, 0),
            hidden[name],
            alarms[name],
            clopper_pearson(alarms[name], hidden[name], 0.95),
        )
        for name in sorted(labels)
    ]


def agreement(found: Iterable[Judgement]) -> float | None:
    """Krippendorff's alpha (ordinal) over the diffs that several experts judged."""
    return krippendorff_alpha([judgement.votes for judgement in found])


def parents(class_key: str) -> list[str]:
    """The class itself and its parents, most specific first: a/b/c, a/b, a."""
    parts = class_key.split("/")
    return ["/".join(parts[:size]) for size in range(len(parts), 0, -1)]


def export(session: Session, run: Run) -> Iterator[dict[str, Any]]:
    """Every label and skip of the run as plain records, with the side that was hidden and the
    earlier verdicts that it replaced."""
    earlier = _earlier(session, run)
    rows = session.execute(
        select(Presentation, Label, Expert, Diff)
        .join(Expert, Expert.id == Presentation.expert_id)
        .join(Diff, Diff.id == Presentation.diff_id)
        .outerjoin(
            Label,
            (Label.diff_id == Presentation.diff_id) & (Label.expert_id == Presentation.expert_id),
        )
        .where(Diff.run_id == run.id)
        .order_by(Presentation.id)
    )
    for presentation, label, expert, diff in rows:
        if label is not None or presentation.skip_reason is not None:
            past = earlier.get((diff.id, expert.id), [])
            yield _record(expert, diff, label, presentation, past)
    machine = session.execute(
        select(Label, Expert, Diff)
        .join(Expert, Expert.id == Label.expert_id)
        .join(Diff, Diff.id == Label.diff_id)
        .where(Diff.run_id == run.id, Expert.kind == "machine")
        .order_by(Label.id)
    )
    for label, expert, diff in machine:
        yield _record(expert, diff, label, None, [])


def _differing(run: Run, pair: Literal["change", "noise"]) -> tuple[ColumnElement[bool], ...]:
    left, right = aliased(ReplayedRequest), aliased(ReplayedRequest)
    visible = (
        select(1)
        .select_from(left)
        .join(right, right.id == Diff.right_id)
        .where(
            left.id == Diff.left_id,
            or_(
                left.output_text.is_distinct_from(right.output_text),
                left.error.is_distinct_from(right.error),
            ),
        )
        .exists()
    )
    return Diff.run_id == run.id, Diff.pair == pair, Diff.kind != "same", visible


def _repeat_differs(run: Run) -> ColumnElement[bool]:
    noise = aliased(Diff)
    repeat = select(1).where(
        noise.run_id == run.id,
        noise.pair == "noise",
        noise.request_id == Diff.request_id,
        noise.kind != "same",
    )
    return repeat.exists()


def _earlier(session: Session, run: Run) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Verdicts that were replaced or taken back, oldest first, by diff and expert."""
    rows = session.scalars(
        select(PastLabel)
        .join(Diff, Diff.id == PastLabel.diff_id)
        .where(Diff.run_id == run.id)
        .order_by(PastLabel.id)
    )
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for past in rows:
        found[past.diff_id, past.expert_id].append(
            {
                "value": past.value,
                "comment": past.comment,
                "created_at": past.created_at.isoformat(),
                "withdrawn_at": past.withdrawn_at.isoformat(),
            }
        )
    return found


def _record(
    expert: Expert,
    diff: Diff,
    label: Label | None,
    presentation: Presentation | None,
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "run": diff.run_id,
        "diff": diff.id,
        "pair": diff.pair,
        "request_id": diff.request_id,
        "class_key": diff.class_key,
        "expert": expert.name,
        "basis": expert.kind,
        "value": None if label is None else label.value,
        "comment": None if label is None else label.comment,
        "seconds": None if label is None else label.seconds,
        "guideline": None if label is None else label.guideline,
        "created_at": None if label is None else label.created_at.isoformat(),
        "new_side": None if presentation is None else presentation.new_side,
        "skip_reason": None if presentation is None else presentation.skip_reason,
        "earlier": earlier,
    }


def _votes(session: Session, run: Run, basis: Basis) -> dict[int, Sequence[int]]:
    rows = session.execute(
        select(Label.diff_id, Label.value)
        .join(Expert, Expert.id == Label.expert_id)
        .join(Diff, Diff.id == Label.diff_id)
        .where(Diff.run_id == run.id, Diff.pair == "change", Expert.kind == basis)
        .order_by(Label.id)
    )
    votes: dict[int, list[int]] = defaultdict(list)
    for diff_id, value in rows:
        votes[diff_id].append(value)
    return dict(votes)
