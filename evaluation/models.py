"""What people and machines said about diffs, and what was decided from it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from replay.database import Base, now
from replay.models import Diff, Run


class Expert(Base):
    """Somebody who labels. `kind` is `expert` (a person) or `machine` (a pre-labeller)."""

    __tablename__ = "experts"
    __table_args__ = (CheckConstraint("kind IN ('expert', 'machine')"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str] = mapped_column(default="expert")
    created_at: Mapped[datetime] = mapped_column(default=now)


class Presentation(Base):
    """How one diff was shown to one expert. `new_side` (left or right) never leaves the server.

    `token` is all that a client gets. `skip_reason` is set when the expert declined to judge.
    """

    __tablename__ = "presentations"
    __table_args__ = (
        UniqueConstraint("diff_id", "expert_id"),
        CheckConstraint("new_side IN ('left', 'right')"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    token: Mapped[str] = mapped_column(unique=True)
    diff_id: Mapped[int] = mapped_column(ForeignKey("diffs.id", ondelete="CASCADE"))
    expert_id: Mapped[int] = mapped_column(ForeignKey("experts.id"))
    new_side: Mapped[str]
    skip_reason: Mapped[str | None]
    shown_at: Mapped[datetime] = mapped_column(default=now)

    diff: Mapped[Diff] = relationship()
    expert: Mapped[Expert] = relationship()


class Label(Base):
    """The verdict that counts of one expert on one diff: -1 the new build harms, 0 neutral, +1 it
    helps."""

    __tablename__ = "labels"
    __table_args__ = (
        UniqueConstraint("diff_id", "expert_id"),
        CheckConstraint("value IN (-1, 0, 1)"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    diff_id: Mapped[int] = mapped_column(ForeignKey("diffs.id", ondelete="CASCADE"), index=True)
    expert_id: Mapped[int] = mapped_column(ForeignKey("experts.id"))
    value: Mapped[int]
    comment: Mapped[str | None]
    seconds: Mapped[float | None]
    guideline: Mapped[str] = mapped_column(default="1")
    created_at: Mapped[datetime] = mapped_column(default=now)

    diff: Mapped[Diff] = relationship()
    expert: Mapped[Expert] = relationship()


class PastLabel(Base):
    """A verdict that no longer counts: at `withdrawn_at` its expert replaced it or took it back."""

    __tablename__ = "past_labels"
    __table_args__ = (CheckConstraint("value IN (-1, 0, 1)"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    diff_id: Mapped[int] = mapped_column(ForeignKey("diffs.id", ondelete="CASCADE"), index=True)
    expert_id: Mapped[int] = mapped_column(ForeignKey("experts.id"))
    value: Mapped[int]
    comment: Mapped[str | None]
    seconds: Mapped[float | None]
    guideline: Mapped[str]
    created_at: Mapped[datetime]
    withdrawn_at: Mapped[datetime]


class Decision(Base):
    """What the gate decided about a run. `exit_code`: 0 pass, 1 fail, 2 too little, 3 invalid."""

    __tablename__ = "decisions"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    exit_code: Mapped[int]
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)

    run: Mapped[Run] = relationship()


class PublishedPolicy(Base):
    """A feedback policy that was written for an engine to load."""

    __tablename__ = "policies"

    id: Mapped[int] = mapped_column(primary_key=True)
    policy_id: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    document: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)

    run: Mapped[Run] = relationship()
