"""Verdicts counted: one per diff, by experts or (where a policy allows it) by a machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy.orm import Session

from evaluation.judgements import judgements
from replay.history import changed_diffs
from replay.models import Run


@dataclass(frozen=True)
class Resolved:
    """What is known about one diff. `verdict` is None when open or disputed."""

    diff_id: int
    class_key: str
    verdict: int | None
    disputed: bool
    harm_seen: bool
    by_machine: bool


@dataclass(frozen=True)
class Tally:
    """Diffs of a run or class by verdict.

    `disputed` diffs have enough votes but no verdict; in `disputed_harm` of them somebody saw
    harm. `machine` of the verdicts are a machine's.
    """

    diffs: int
    harm: int
    neutral: int
    benefit: int
    disputed: int
    disputed_harm: int
    machine: int

    @property
    def judged(self) -> int:
        return self.harm + self.neutral + self.benefit + self.disputed

    @property
    def open(self) -> int:
        return self.diffs - self.judged


def resolve(
    session: Session, run: Run, *, min_experts: int, accept_machine: bool
) -> list[Resolved]:
    """One entry per diff of the run that can be judged, in labelling order."""
    machine = (
        {found.diff_id: found for found in judgements(session, run, "machine")}
        if accept_machine
        else {}
    )
    resolved = []
    for found in judgements(session, run, "expert"):
        by_machine = found.diff_id in machine and len(found.votes) < min_experts
        votes, needed = (machine[found.diff_id], 1) if by_machine else (found, min_experts)
        disputed = votes.disputed(needed)
        resolved.append(
            Resolved(
                diff_id=found.diff_id,
                class_key=found.class_key,
                verdict=votes.verdict(needed),
                disputed=disputed,
                harm_seen=disputed and -1 in votes.votes,
                by_machine=by_machine and bool(votes.votes),
            )
        )
    return resolved


def dispute_numbers(session: Session, run: Run, found: Iterable[Resolved]) -> tuple[int, ...]:
    """The disputed diffs by the numbers that `inferloop replay show --diff` takes."""
    disputed = {entry.diff_id for entry in found if entry.disputed}
    numbered = enumerate(changed_diffs(session, run) if disputed else (), start=1)
    return tuple(number for number, diff in numbered if diff.id in disputed)


def tally(found: Iterable[Resolved]) -> Tally:
    """Count verdicts."""
    entries = list(found)
    verdicts = [entry.verdict for entry in entries]
    return Tally(
        diffs=len(entries),
        harm=verdicts.count(-1),
        neutral=verdicts.count(0),
        benefit=verdicts.count(1),
        disputed=sum(entry.disputed for entry in entries),
        disputed_harm=sum(entry.harm_seen for entry in entries),
        machine=sum(entry.by_machine for entry in entries),
    )
