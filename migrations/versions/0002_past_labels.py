"""Verdicts that were replaced or taken back are kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "past_labels",
        sa.Column("id", sa.Integer(), nullable=False, primary_key=True),
        sa.Column(
            "diff_id",
            sa.Integer(),
            sa.ForeignKey("diffs.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
        sa.Column("expert_id", sa.Integer(), sa.ForeignKey("experts.id"), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.Column("comment", sa.String(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("guideline", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("withdrawn_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("value IN (-1, 0, 1)", name="ck_past_labels_value"),
    )
