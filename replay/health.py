"""Waiting until a build answers that it is healthy. Not for saying why one is not, nor for what it
serves: that is `replay.builds`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import httpx

POLL_S = 0.1
KEY_REFUSED = (401, 403)


class Health(NamedTuple):
    """One look at a build: the HTTP status (0: no answer), in words, and whether it connected."""

    status: int
    state: str
    connected: bool = False

    @property
    def is_healthy(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_key_refused(self) -> bool:
        return self.status in KEY_REFUSED


async def until_healthy(
    client: httpx.AsyncClient,
    check_alive: Callable[[], None],
    *,
    timeout_s: float,
    unreachable_s: float,
) -> Health:
    """What was seen last: a healthy build, one that refuses its caller, or what it was after
    `timeout_s`, or after `unreachable_s` in which it took no connection. Raises what `check_alive`
    raises, which is called before each look and once the build is healthy.
    """
    now = time.monotonic()
    deadline, reachable_by = now + timeout_s, now + unreachable_s
    found = Health(0, "no answer")
    while (now := time.monotonic()) < min(deadline, reachable_by):
        check_alive()
        # The last look is cut off: what was seen before it says more.
        found = await look(client, deadline - now) or found._replace(connected=True)
        if found.is_healthy:
            check_alive()
        if found.is_healthy or found.is_key_refused:
            return found
        if found.connected:
            reachable_by = time.monotonic() + unreachable_s
        await asyncio.sleep(POLL_S)
    return found


async def look(client: httpx.AsyncClient, limit_s: float) -> Health | None:
    """None: the connection, if any, has brought no answer within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            response = await client.get("/health")
            if response.status_code == 404:
                response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        return Health(0, f"{type(error).__name__}: {error}".rstrip(": "), connected)
    except TimeoutError:
        return None
    return Health(response.status_code, f"status {response.status_code}", connected=True)
