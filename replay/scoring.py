"""Teacher-forced scores: how likely a build finds an answer that is given to it, token by token.

Uses `prompt_logprobs` of /v1/completions as vLLM and inferloop serve it, so that any build can be
the judge. Prompt and answer must be tokens of that build's own tokenizer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from replay.builds import BuildSpec, RunningBuild
from replay.client import TIMEOUT
from replay.passes import Progress
from replay.stream import UNREADABLE, error_message, one_line

CONCURRENCY = 4


class Given(NamedTuple):
    """An answer to be scored, after its prompt; token ids."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """Natural-log probabilities of an answer's tokens. `error` says why there are none."""

    logprobs: list[float]
    error: str | None = None

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def mean(self) -> float | None:
        """Per token; None without tokens."""
        return self.total / len(self.logprobs) if self.logprobs else None


def score_answers(
    spec: BuildSpec, given: Sequence[Given], *, log: Path, progress: Progress | None = None
) -> list[Score]:
    """Start the build, score all answers, stop it. Raises BuildError when it does not start.

    A request that fails (too long for the build, say) gives a Score with an `error`.
    """
    return asyncio.run(_score_with(spec, given, log, progress or (lambda what, done, total: None)))


async def score_all(build: RunningBuild, given: Sequence[Given], progress: Progress) -> list[Score]:
    """Score answers by a build that runs, a few at a time; same order as `given`."""
    gate = asyncio.Semaphore(CONCURRENCY)
    done = 0

    async def one(client: httpx.AsyncClient, item: Given) -> Score:
        nonlocal done
        async with gate:
            score = await _score(client, build.model, item)
        done += 1
        progress(f"scoring by {build.spec.name}", done, len(given))
        return score

    async with build.open_http(TIMEOUT) as client:
        return list(await asyncio.gather(*(one(client, item) for item in given)))


async def _score_with(
    spec: BuildSpec, given: Sequence[Given], log: Path, progress: Progress
) -> list[Score]:
    progress(f"starting {spec.name}", 0, 0)
    async with RunningBuild(spec, log=log) as build:
        return await score_all(build, given, progress)


async def _score(client: httpx.AsyncClient, model: str, item: Given) -> Score:
    if not item.answer:
        return Score([])
    body = {
        "model": model,
        "prompt": [*item.prompt, *item.answer],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 1,
    }
    try:
        response = await client.post("/v1/completions", json=body)
        if response.is_error:
            return Score([], error_message(response.content))
        choice = response.json()["choices"][0]
        return Score(answer_logprobs(choice["prompt_logprobs"], item))
    except httpx.HTTPError as error:
        return Score([], f"{type(error).__name__}: {error}".rstrip(": "))
    except UNREADABLE as error:
        return Score([], f"the build returned no usable prompt_logprobs: {one_line(repr(error))}")


def answer_logprobs(entries: Sequence[dict[str, Any] | None], item: Given) -> list[float]:
    """The answer's share of `prompt_logprobs`, which has one entry per token of prompt + answer
    (null for the first). Raises ValueError when it does not."""
    count = len(item.prompt) + len(item.answer)
    if len(entries) != count:
        raise ValueError(f"{len(entries)} entries for {count} tokens")
    found = []
    for token_id, entry in zip(item.answer, entries[len(item.prompt) :], strict=True):
        if entry is None:
            raise ValueError("an answer without a prompt has no score for its first token")
        logprob = float(entry[str(token_id)]["logprob"])
        if not math.isfinite(logprob):
            raise ValueError(f"the log-probability of token {token_id} is {logprob}")
        found.append(logprob)
    return found
