"""Machine labels by likelihood: which of two answers does a referee build find more likely?

A cheap first sort, stored under an expert of kind `machine` and never counted as an expert's. Its
limits: likelihood favours short and repetitive answers and knows nothing of truth.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import delete, select
from sqlalchemy.orm import Session, sessionmaker

from evaluation.errors import EvaluationError
from evaluation.judgements import find_run, judgeable, visible_noise
from evaluation.labels import MACHINE_PREFIX, MAX_NAME, expert_named
from evaluation.models import Label
from replay.builds import BuildSpec, RunningBuild
from replay.models import Diff, Run
from replay.passes import Progress
from replay.scoring import Given, Score, score_all

GUIDELINE = "likelihood/1"
LEAST_THRESHOLD = 0.02
"""Nats per token. Smaller differences are neutral however quiet the A/A pairs are."""
NOISE_QUANTILE = 0.95
MAX_NOISE_PAIRS = 64


@dataclass(frozen=True)
class Prelabels:
    """What was stored: labels by value, changes that could not be scored (and a `reason`), and the
    difference in mean log-probability (nats per token) up to which a label is neutral."""

    expert: str
    harm: int
    neutral: int
    benefit: int
    unscored: int
    reason: str | None
    threshold: float


def prelabel(
    sessions: sessionmaker[Session],
    referee: BuildSpec,
    *,
    run_id: int | None = None,
    least_threshold: float = LEAST_THRESHOLD,
    log: Path,
    progress: Progress,
) -> Prelabels:
    """Score both answers of every change by `referee`, usually the same weights in float32.

    +1 when the new answer's mean log-probability after the old build's prompt is higher by more
    than the threshold, -1 when lower, else 0. The threshold is the 95 % quantile of the same
    difference over the run's A/A pairs, and never below `least_threshold` (nats per token).
    Replaces this referee's earlier labels of the run. Raises EvaluationError when the referee has
    another tokenizer than the run's builds, BuildError when it does not start.
    """
    with sessions() as session:
        run = find_run(session, run_id, valid=True)
        changes = session.scalars(select(Diff).where(*judgeable(run)).order_by(Diff.id)).all()
        noise = session.scalars(
            select(Diff).where(*visible_noise(run)).order_by(Diff.id).limit(MAX_NOISE_PAIRS)
        ).all()
        given = [item for diff in (*changes, *noise) for item in _given(diff)]
        fingerprint, flat = asyncio.run(_scores(referee, run, given, log, progress))
        scores = list(zip(flat[::2], flat[1::2], strict=True))
        threshold = _threshold(scores[len(changes) :], least_threshold)
        room = MAX_NAME - len(MACHINE_PREFIX) - 9
        expert = f"{MACHINE_PREFIX}{referee.name[:room]}:{fingerprint[:8]}"
        values = _store(session, expert, changes, scores[: len(changes)], threshold)
        session.commit()
    return Prelabels(
        expert=expert,
        harm=values[-1],
        neutral=values[0],
        benefit=values[1],
        unscored=len(changes) - values.total(),
        reason=_reason(scores[: len(changes)]),
        threshold=threshold,
    )


def _given(diff: Diff) -> tuple[Given, Given]:
    """Old and new answer after the prompt that the old build saw."""
    prompt = diff.left.prompt_token_ids or []
    return (
        Given(prompt, diff.left.output_token_ids or []),
        Given(prompt, diff.right.output_token_ids or []),
    )


async def _scores(
    referee: BuildSpec, run: Run, given: Sequence[Given], log: Path, progress: Progress
) -> tuple[str, list[Score]]:
    progress(f"starting {referee.name}", 0, 0)
    async with RunningBuild(referee, log=log) as build:
        _check_tokenizer(build, run)
        return build.fingerprint, await score_all(build, given, progress)


def _check_tokenizer(build: RunningBuild, run: Run) -> None:
    """Token ids mean nothing to another tokenizer. Engines that do not say theirs are trusted."""
    own = build.components.get("tokenizer")
    for subject in (run.old_build, run.new_build):
        other = subject.components.get("tokenizer")
        if own is not None and other is not None and own != other:
            raise EvaluationError(
                f"the referee {build.spec.name} has tokenizer {own}, build {subject.name} has "
                f"{other}: use a referee of the same model"
            )


def _reason(scores: Sequence[tuple[Score, Score]]) -> str | None:
    """Why the first change that has no label has none."""
    for pair in scores:
        for score in pair:
            if score.mean is None:
                return score.error or "an answer has no token ids"
    return None


def _difference(old: Score, new: Score) -> float | None:
    if old.mean is None or new.mean is None:
        return None
    return new.mean - old.mean


def _threshold(noise: Sequence[tuple[Score, Score]], least: float) -> float:
    known = [abs(d) for old, new in noise if (d := _difference(old, new)) is not None]
    return max(least, float(np.quantile(known, NOISE_QUANTILE))) if known else least


def _store(
    session: Session,
    name: str,
    changes: Sequence[Diff],
    scores: Sequence[tuple[Score, Score]],
    threshold: float,
) -> Counter[int]:
    """Replace the labels of the referee `name` on `changes`; how many there are of each value."""
    expert = expert_named(session, name, "machine")
    ids = [diff.id for diff in changes]
    session.execute(delete(Label).where(Label.expert_id == expert.id, Label.diff_id.in_(ids)))
    values: Counter[int] = Counter()
    for diff, (old, new) in zip(changes, scores, strict=True):
        difference = _difference(old, new)
        if difference is None:
            continue
        value = 0 if abs(difference) <= threshold else 1 if difference > 0 else -1
        values[value] += 1
        session.add(
            Label(
                diff_id=diff.id,
                expert_id=expert.id,
                value=value,
                guideline=GUIDELINE,
                comment=f"mean log-probability a token: old {old.mean:.4f}, new {new.mean:.4f}, "
                f"neutral within {threshold:.4f}",
            )
        )
    return values
