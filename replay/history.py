"""Finds earlier runs and what changed in them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from replay.errors import RunError
from replay.models import Diff, Run

STAGE_ORDER = ("error", "prompt", "prompt_ids", "sampling", "stop", "output", "text", "finish")


def find_run(session: Session, run_id: int | None) -> Run:
    """The run with this number, or the newest; raises RunError when there is none."""
    query = select(Run).options(selectinload(Run.old_build), selectinload(Run.new_build))
    if run_id is None:
        run = session.scalars(query.order_by(Run.id.desc()).limit(1)).first()
    else:
        run = session.scalars(query.where(Run.id == run_id)).first()
    if run is None:
        missing = "there is no run yet" if run_id is None else f"there is no run {run_id}"
        raise RunError(f"{missing}: make one with `inferloop replay`, see `inferloop replay list`")
    return run


def recent_runs(session: Session, limit: int) -> Sequence[Run]:
    """The newest runs, newest first."""
    query = select(Run).options(selectinload(Run.old_build), selectinload(Run.new_build))
    return session.scalars(query.order_by(Run.id.desc()).limit(limit)).all()


def changed_diffs(session: Session, run: Run) -> list[Diff]:
    """What changed between OLD and NEW, with both answers: the clearest changes first.

    What A/A showed too comes last; then earlier stages, then larger margins at the fork.
    """
    query = (
        select(Diff)
        .where(Diff.run_id == run.id, Diff.pair == "change", Diff.kind != "same")
        .options(selectinload(Diff.left), selectinload(Diff.right))
    )

    def clearest_first(diff: Diff) -> tuple[bool, int, float, int]:
        noisy = bool(diff.detail.get("also_in_noise"))
        return noisy, STAGE_ORDER.index(diff.kind), -(diff.margin or 0.0), diff.id

    return sorted(session.scalars(query), key=clearest_first)
