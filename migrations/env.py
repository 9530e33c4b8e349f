"""Alembic's environment: runs on the connection that `migrations.upgrade` opened.

Not for `alembic upgrade` from a shell: `inferloop db upgrade` does that with the right lock.
"""

from __future__ import annotations

from alembic import context

import evaluation.models  # noqa: F401 - registers its tables, and through them replay's
from replay.database import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()
