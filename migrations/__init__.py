"""Alembic migrations of the relational database."""
