"""A lake with synthetic requests whose latencies have a known shape."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from capture.lake import LakePlace, open_connection
from capture.settings import Settings

ENGINE = UUID(int=7)
START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def make_lake(home: Path, *, requests: int = 40, tokens: int = 30, lost: int = 0) -> LakePlace:
    """`requests` one second apart from START, each with `tokens` tokens 10 ms apart; those of the
    middle fifth take 100 ms. With `lost`, one loss of that many tokens is noticed halfway."""
    place = LakePlace.from_settings(Settings(home=home))
    with open_connection(place, read_only=False) as lake:
        lake.execute(
            """
            INSERT INTO requests SELECT ?, i, printf('%032x', i),
                ?::TIMESTAMP + to_milliseconds(i * 1000), 10, 0, 100, 50, 0,
                'acme', 'chat', 'acme/chat/-' FROM range(?) AS t(i)
            """,
            [ENGINE, START.replace(tzinfo=None), requests],
        )
        lake.execute(
            """
            INSERT INTO tokens SELECT ?, i, i * 1000 + p, p, 1, p = 0,
                ?::TIMESTAMP + to_milliseconds(i * 1000 + (p + 1) * ms), ms * 1000, -0.1, 1.0, 1
            FROM (
                SELECT i, CASE WHEN i >= ? AND i < ? THEN 100 ELSE 10 END AS ms
                FROM range(?) AS t(i)
            ), range(?) AS u(p)
            """,
            [
                ENGINE,
                START.replace(tzinfo=None),
                requests * 2 // 5,
                requests * 3 // 5,
                requests,
                tokens,
            ],
        )
        lake.execute(
            """
            INSERT INTO finishes SELECT engine_id, slot, 'stop', ?, arrived_at,
                arrived_at + to_milliseconds(10), arrived_at + to_milliseconds(10 * ?), arrived_at,
                arrived_at, arrived_at, arrived_at + to_milliseconds(100 * ?) FROM requests
            """,
            [tokens, tokens, tokens],
        )
        if lost:
            noticed = START + timedelta(seconds=requests // 2)
            lake.execute(
                "INSERT INTO losses VALUES (?, 1, ?, 'overwritten', 5, 3, ?, NULL)",
                [ENGINE, noticed.replace(tzinfo=None), lost],
            )
    return place
