"""The demo's clients: they send the committed prompts the way an application would."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import httpx

from replay.builds import RunningBuild

TIMEOUT = httpx.Timeout(120.0)

Prompt = dict[str, Any]


class DemoError(Exception):
    """A step of the demo did not do what it is for."""

    exit_code = 1


def load_prompts(limit: int | None = None) -> list[Prompt]:
    """The prompts that ship with the product, spread over their classes when `limit` cuts them."""
    lines = files("cli.demo").joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


async def send(
    server: RunningBuild, prompts: Sequence[Prompt], interval_s: float, done: Callable[[], None]
) -> None:
    """Send one prompt every `interval_s`, whether earlier ones are answered or not; 0 sends all
    in the same moment, so that the scheduler has to choose.

    Raises DemoError when one is not answered.
    """
    start = time.monotonic()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.base_url, timeout=TIMEOUT, limits=limits
    ) as client:
        sending = []
        for index, prompt in enumerate(prompts):
            await asyncio.sleep(max(0.0, start + index * interval_s - time.monotonic()))
            sending.append(asyncio.create_task(_send(client, server.model, prompt, done)))
        await asyncio.gather(*sending)


async def _send(
    client: httpx.AsyncClient, model: str, prompt: Prompt, done: Callable[[], None]
) -> None:
    headers = {"X-Tenant": prompt["tenant"], "X-Route": prompt["route"]}
    given = {key: value for key, value in prompt.items() if key not in ("tenant", "route")}
    body = {"model": model, "temperature": 0.0, "stream": True} | given
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as got:
            if got.is_error:
                await got.aread()
                raise DemoError(f"the engine answered {got.status_code}: {got.text}")
            async for _ in got.aiter_bytes():
                pass
    except httpx.HTTPError as error:
        raise DemoError(f"the engine did not answer: {type(error).__name__} {error}") from error
    done()
