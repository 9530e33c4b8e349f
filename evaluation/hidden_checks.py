"""Hidden checks: A/A pairs among those an expert judges, whose verdicts are false alarms.

One in every block of CHECK_BLOCK pairs, at a place drawn at random. The last block of a run is
shorter and has its check all the same, so that the number of pairs to go is exact and no place in
it is surely none. Not for what the verdicts on them amount to: `evaluation.judgements`.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from evaluation.judgements import shuffle_key, visible_noise
from evaluation.models import Expert, Presentation
from replay.models import Diff, ReplayedRequest, Run

CHECK_BLOCK = 8


class Block(NamedTuple):
    """What an expert was shown of the current block, which may have begun in another run.
    `checked`: its hidden check too; `here`: the newest pair was one of this run."""

    shown: int
    checked: bool
    here: bool


def current_block(session: Session, run: Run, expert: Expert) -> Block:
    """The block in which the next pair of this run will be."""
    shown = session.execute(
        select(Diff.pair, Diff.run_id)
        .join(Presentation, Presentation.diff_id == Diff.id)
        .where(Presentation.expert_id == expert.id)
        .order_by(Presentation.id)
    ).all()
    block = shown[len(shown) - len(shown) % CHECK_BLOCK :]
    return Block(
        shown=len(block),
        checked=any(pair == "noise" for pair, _ in block),
        here=bool(block) and block[-1][1] == run.id,
    )


def places_of_check(block: Block, changes: int) -> int:
    """Among how many next pairs the block's check is, each as likely; 0: it was shown.

    Where the `changes` still to be shown do not fill the block, the check may also come last.
    """
    if block.checked or not (changes or block.here):
        return 0
    return min(CHECK_BLOCK - block.shown, changes + 1)


def checks_to_come(block: Block, changes: int) -> int:
    """Checks among the pairs still to be shown when `changes` of those are none."""
    pending = places_of_check(block, changes) > 0
    beyond = max(changes - (CHECK_BLOCK - block.shown - pending), 0)
    return pending + -(-beyond // (CHECK_BLOCK - 1))


def fresh_checks(session: Session, run: Run, seen: set[int]) -> list[int]:
    """Diffs of A/A pairs that can be shown and were not, those that differ first."""
    differing = set(session.scalars(select(Diff.id).where(*visible_noise(run))))
    every = session.scalars(
        select(Diff.id)
        .join(ReplayedRequest, ReplayedRequest.id == Diff.left_id)
        .where(
            Diff.run_id == run.id,
            Diff.pair == "noise",
            ReplayedRequest.output_text.is_not(None),
        )
    )
    fresh = (differing | set(every)) - seen
    return sorted(fresh, key=lambda diff_id: (diff_id not in differing, shuffle_key(run, diff_id)))
