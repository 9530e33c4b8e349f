"""Builds, runs, replayed requests and diffs; experts, labels, decisions and policies."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _builds_and_runs()
    _replayed_requests()
    _diffs()
    _experts_and_labels()
    _decisions_and_policies()


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer(), nullable=False, primary_key=True)


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _reference(
    name: str, target: str, *, cascade: bool = False, index: bool = False
) -> sa.Column[int]:
    on_delete = "CASCADE" if cascade else None
    key = sa.ForeignKey(f"{target}.id", ondelete=on_delete)
    return sa.Column(name, sa.Integer(), key, nullable=False, index=index)


def _builds_and_runs() -> None:
    op.create_table(
        "builds",
        _id(),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False, unique=True),
        sa.Column("components", sa.JSON(), nullable=False),
        _time("created_at"),
    )
    op.create_table(
        "runs",
        _id(),
        _reference("old_build_id", "builds"),
        _reference("new_build_id", "builds"),
        sa.Column("traffic_file", sa.String(), nullable=False),
        sa.Column("traffic_digest", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        _time("started_at"),
        _time("finished_at", nullable=True),
        sa.Column("summary", sa.JSON(), nullable=False),
    )


def _replayed_requests() -> None:
    op.create_table(
        "replayed_requests",
        _id(),
        _reference("run_id", "runs", cascade=True, index=True),
        sa.Column("arm", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("class_key", sa.String(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("rendered_prompt", sa.String(), nullable=True),
        sa.Column("prompt_token_ids", sa.JSON(), nullable=True),
        sa.Column("resolved_sampling", sa.JSON(), nullable=True),
        sa.Column("output_text", sa.String(), nullable=True),
        sa.Column("output_token_ids", sa.JSON(), nullable=True),
        sa.Column("logprobs", sa.JSON(), nullable=True),
        sa.Column("margins", sa.JSON(), nullable=True),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("scheduled_ms", sa.Double(), nullable=False),
        sa.Column("sent_ms", sa.Double(), nullable=False),
        sa.Column("ttft_ms", sa.Double(), nullable=True),
        sa.Column("itl_ms", sa.JSON(), nullable=True),
        sa.Column("duration_ms", sa.Double(), nullable=True),
        sa.UniqueConstraint("run_id", "arm", "request_id"),
    )


def _diffs() -> None:
    op.create_table(
        "diffs",
        _id(),
        _reference("run_id", "runs", cascade=True, index=True),
        sa.Column("pair", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("class_key", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        _reference("left_id", "replayed_requests", cascade=True),
        _reference("right_id", "replayed_requests", cascade=True),
        sa.Column("first_divergent", sa.Integer(), nullable=True),
        sa.Column("margin", sa.Double(), nullable=True),
        sa.Column("token_distance", sa.Integer(), nullable=True),
        sa.Column("text_distance", sa.Integer(), nullable=True),
        sa.Column("input", sa.JSON(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.UniqueConstraint("run_id", "pair", "request_id"),
    )
    op.create_index("ix_diffs_run_kind", "diffs", ["run_id", "kind"])


def _experts_and_labels() -> None:
    op.create_table(
        "experts",
        _id(),
        sa.Column("name", sa.String(), nullable=False, unique=True),
        sa.Column("kind", sa.String(), nullable=False),
        _time("created_at"),
        sa.CheckConstraint("kind IN ('expert', 'machine')", name="ck_experts_kind"),
    )
    op.create_table(
        "presentations",
        _id(),
        sa.Column("token", sa.String(), nullable=False, unique=True),
        _reference("diff_id", "diffs", cascade=True),
        _reference("expert_id", "experts"),
        sa.Column("new_side", sa.String(), nullable=False),
        sa.Column("skip_reason", sa.String(), nullable=True),
        _time("shown_at"),
        sa.UniqueConstraint("diff_id", "expert_id"),
        sa.CheckConstraint("new_side IN ('left', 'right')", name="ck_presentations_side"),
    )
    op.create_table(
        "labels",
        _id(),
        _reference("diff_id", "diffs", cascade=True, index=True),
        _reference("expert_id", "experts"),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.Column("comment", sa.String(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("guideline", sa.String(), nullable=False),
        _time("created_at"),
        sa.UniqueConstraint("diff_id", "expert_id"),
        sa.CheckConstraint("value IN (-1, 0, 1)", name="ck_labels_value"),
    )


def _decisions_and_policies() -> None:
    op.create_table(
        "decisions",
        _id(),
        _reference("run_id", "runs", cascade=True, index=True),
        sa.Column("exit_code", sa.Integer(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        _time("created_at"),
    )
    op.create_table(
        "policies",
        _id(),
        sa.Column("policy_id", sa.String(), nullable=False, unique=True),
        _reference("run_id", "runs", cascade=True),
        sa.Column("document", sa.JSON(), nullable=False),
        _time("created_at"),
    )
