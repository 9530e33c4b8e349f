"""What a replay leaves behind: builds, runs, replayed requests and their diffs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from replay.database import Base, now


class Build(Base):
    """A build of an engine, known by its fingerprint (hex digest over `components`). `name` is the
    first it had; runs may call it otherwise (see `Run.name_of`)."""

    __tablename__ = "builds"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    fingerprint: Mapped[str] = mapped_column(unique=True)
    components: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Run(Base):
    """One A/A/B replay of a traffic file.

    `status`: running, valid, invalid (see `reason`) or aborted (interrupted; see `reason`). A run
    whose process was killed stays `running`; `summary["process"]` says which process that was.
    """

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    old_build_id: Mapped[int] = mapped_column(ForeignKey("builds.id"))
    new_build_id: Mapped[int] = mapped_column(ForeignKey("builds.id"))
    traffic_file: Mapped[str]
    traffic_digest: Mapped[str]
    status: Mapped[str] = mapped_column(default="running")
    reason: Mapped[str | None]
    started_at: Mapped[datetime] = mapped_column(default=now)
    finished_at: Mapped[datetime | None]
    summary: Mapped[dict[str, Any]] = mapped_column(default=dict)

    old_build: Mapped[Build] = relationship(foreign_keys=[old_build_id])
    new_build: Mapped[Build] = relationship(foreign_keys=[new_build_id])
    requests: Mapped[list[ReplayedRequest]] = relationship(back_populates="run")
    diffs: Mapped[list[Diff]] = relationship(back_populates="run")

    def name_of(self, side: Literal["old", "new"]) -> str:
        """What the build file of that side called its build: yesterday's candidate, known by the
        same fingerprint, is today's baseline."""
        build = self.old_build if side == "old" else self.new_build
        return str(self.summary.get("builds", {}).get(side, build.name))


class ReplayedRequest(Base):
    """One request answered by one arm (`old_a`, `old_b`, `new`) of a run."""

    __tablename__ = "replayed_requests"
    __table_args__ = (UniqueConstraint("run_id", "arm", "request_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    arm: Mapped[str]
    request_id: Mapped[str]
    class_key: Mapped[str]
    status: Mapped[int]
    error: Mapped[str | None]
    rendered_prompt: Mapped[str | None]
    prompt_token_ids: Mapped[list[int] | None]
    resolved_sampling: Mapped[dict[str, Any] | None]
    output_text: Mapped[str | None]
    output_token_ids: Mapped[list[int] | None]
    logprobs: Mapped[list[float] | None]
    margins: Mapped[list[float] | None]
    finish_reason: Mapped[str | None]
    scheduled_ms: Mapped[float]
    sent_ms: Mapped[float]
    ttft_ms: Mapped[float | None]
    itl_ms: Mapped[list[float] | None]
    duration_ms: Mapped[float | None]

    run: Mapped[Run] = relationship(back_populates="requests")


class Diff(Base):
    """What changed for one request between two arms.

    `pair` is `noise` (old_a against old_b) or `change` (old_a against new). `kind` is the first
    stage at which they differ: error, prompt, prompt_ids, sampling, stop, output, text (equal
    tokens, other characters), finish; or same. `first_divergent` is an index in the output;
    `margin` the old build's log-probability margin there, in nats. `input` is what was asked:
    {"messages": [...]} or {"prompt": "..."}.
    """

    __tablename__ = "diffs"
    __table_args__ = (
        UniqueConstraint("run_id", "pair", "request_id"),
        Index("ix_diffs_run_kind", "run_id", "kind"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    pair: Mapped[str]
    request_id: Mapped[str]
    class_key: Mapped[str]
    kind: Mapped[str]
    left_id: Mapped[int] = mapped_column(ForeignKey("replayed_requests.id", ondelete="CASCADE"))
    right_id: Mapped[int] = mapped_column(ForeignKey("replayed_requests.id", ondelete="CASCADE"))
    first_divergent: Mapped[int | None]
    margin: Mapped[float | None]
    token_distance: Mapped[int | None]
    text_distance: Mapped[int | None]
    input: Mapped[dict[str, Any]] = mapped_column(default=dict)
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)

    run: Mapped[Run] = relationship(back_populates="diffs")
    left: Mapped[ReplayedRequest] = relationship(foreign_keys=[left_id])
    right: Mapped[ReplayedRequest] = relationship(foreign_keys=[right_id])
