"""Sends recorded requests to an OpenAI-compatible server and measures the streamed answers.

While an answer streams, only its pieces and their times are kept; they are parsed when it is
complete, so that the client disturbs what it measures as little as possible. Understands what
inferloop and vLLM add to the API (token ids, log-probabilities, details) and does without it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import httpx

from capture.traffic import TrafficRecord
from replay.errors import BuildError
from replay.stream import Answer, failed, parse_answer

TIMEOUT = httpx.Timeout(connect=10.0, read=300.0, write=60.0, pool=None)
VENDOR_PARAMETERS = ("top_k", "stop_token_ids", "ignore_eos")
"""Sampling parameters that OpenAI's API does not have."""

WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Abilities:
    """What may be asked of a server beyond OpenAI's minimum."""

    token_ids: bool = True
    vendor_parameters: bool = True
    logprobs: bool = True
    alternatives: bool = True


FALLBACKS = (
    Abilities(),
    Abilities(alternatives=False),
    Abilities(token_ids=False),
    Abilities(token_ids=False, vendor_parameters=False),
    Abilities(token_ids=False, vendor_parameters=False, logprobs=False, alternatives=False),
)
"""Tried in this order on the warm-up request; the first that is not refused is used."""


class Client:
    """Requests to one build; call `warm_up` for each endpoint first.

    `abilities` is what the server was found to understand at each endpoint.
    """

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._model = model
        self._http = http
        self.abilities: dict[str, Abilities] = {}

    async def warm_up(self, like: TrafficRecord) -> None:
        """Send a small request with endpoint and parameters of `like`, and learn from it what the
        server understands.

        It is not measured: a fresh process answers its first request slowly. Raises BuildError
        when every form of it is refused.
        """
        chat = like.endpoint == "/v1/chat/completions"
        changes: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hello"}] if chat else None,
            "prompt": None if chat else "Hello",
            "prompt_token_ids": None,
            "sampling": like.sampling.model_copy(update={"max_tokens": WARM_UP_TOKENS}),
        }
        record = like.model_copy(update=changes)
        answer = failed(0, "not sent")
        for abilities in FALLBACKS:
            self.abilities[like.endpoint] = abilities
            answer = await self.send(record)
            if answer.error is None:
                if answer.detailed:  # such a server gives the margins itself
                    self.abilities[like.endpoint] = replace(abilities, alternatives=False)
                return
            if answer.status not in (400, 404, 415, 422, 501):
                break
        raise BuildError(
            f"{self._http.base_url} refuses a first request to {like.endpoint}: {answer.error}"
        )

    async def send(self, record: TrafficRecord) -> Answer:
        """Send one request and wait for its whole answer. Failures are answers with an `error`."""
        body = request_body(record, self._model, self.abilities[record.endpoint])
        pieces: list[tuple[int, bytes]] = []
        sent_ns = time.monotonic_ns()
        try:
            async with self._http.stream(
                "POST", record.endpoint, json=body, headers=_headers(record)
            ) as response:
                async for piece in response.aiter_raw():
                    pieces.append((time.monotonic_ns(), piece))
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            return failed(0, reason, duration_ms=(time.monotonic_ns() - sent_ns) / 1e6)
        return parse_answer(response.status_code, sent_ns, pieces)


def request_body(record: TrafficRecord, model: str, abilities: Abilities) -> dict[str, Any]:
    """The JSON body that repeats a recorded request.

    Sampling parameters that the client left to the server are left to the build too, so that a
    changed default shows. A seed is always sent: the one that was resolved, else one derived from
    the request's id, so that all passes draw alike.
    """
    body: dict[str, Any] = {"model": model, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if record.endpoint == "/v1/chat/completions":
        body["messages"] = record.messages
    else:
        body["prompt"] = record.prompt if record.prompt is not None else record.prompt_token_ids
    body |= _sampling_fields(record, abilities)
    if abilities.token_ids:
        body["return_token_ids"] = True
    if abilities.logprobs:
        alternatives = 2 if abilities.alternatives else 0
        if record.endpoint == "/v1/completions":
            body["logprobs"] = alternatives
        else:
            body["logprobs"] = True
            if alternatives:
                body["top_logprobs"] = alternatives
    return body


def _sampling_fields(record: TrafficRecord, abilities: Abilities) -> dict[str, Any]:
    values = record.sampling.model_dump()
    seed = values.pop("seed")
    chosen = set(values) if record.sampling_set is None else set(record.sampling_set)
    if not abilities.vendor_parameters:
        chosen -= set(VENDOR_PARAMETERS)
    fields = {name: value for name, value in values.items() if name in chosen}
    for name in ("stop", *VENDOR_PARAMETERS):
        if not fields.get(name):
            fields.pop(name, None)
    fields["seed"] = int(record.request_id[:7], 16) if seed is None else seed
    return fields


def uses_vendor_parameters(record: TrafficRecord) -> bool:
    return any(getattr(record.sampling, name) for name in VENDOR_PARAMETERS)


def _headers(record: TrafficRecord) -> dict[str, str]:
    headers = {
        "accept-encoding": "identity",
        "x-inferloop-detail": "1",
        "x-priority": str(record.priority),
        "x-tenant": record.tenant,
        "x-route": record.route,
        "x-conversation": record.conversation_id,
    }
    return {name: value for name, value in headers.items() if _is_header_value(value)}


def _is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable()
