"""The relational database of the settings, ready for a command to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, sessionmaker


def open_database() -> sessionmaker[Session]:
    """Sessions on the configured database, created when it is a fresh SQLite one.

    Raises MigrationError when its schema is another version's.
    """
    import migrations
    from capture.settings import Settings
    from replay.database import open_sessions

    url = Settings().database
    migrations.require_current(url)
    return open_sessions(url)
