"""Rows of a pass reach the database, whenever they come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.orm import sessionmaker

from replay.passes import _flush_until
from tests.waiting import PATIENCE_S


def test_rows_that_come_while_the_last_are_written_are_written_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[dict[str, Any]] = []

    async def write() -> None:
        loop, complete = asyncio.get_running_loop(), asyncio.Event()

        async def end_the_pass(rows: list[dict[str, Any]]) -> None:
            rows.append({"request": 2})
            complete.set()

        def flush(_: object, rows: list[dict[str, Any]]) -> None:
            batch = rows[:]
            if batch == [{"request": 1}]:
                asyncio.run_coroutine_threadsafe(end_the_pass(rows), loop).result(PATIENCE_S)
            written.extend(batch)
            del rows[: len(batch)]

        monkeypatch.setattr("replay.passes._flush", flush)
        await _flush_until(complete, sessionmaker(), [{"request": 1}])

    asyncio.run(write())
    assert written == [{"request": 1}, {"request": 2}]
