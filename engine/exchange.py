"""One HTTP request from its arrival to its traffic record: everything known about it, in one place.

Not for sending bytes (`engine.answers`) or for the bodies' shapes (`engine.replies`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from engine.caller import Caller, RequestIds, class_key
from engine.chat_prompt import Piece, Template, render_chat
from engine.core import Engine
from engine.errors import RequestAborted, RequestError, RequestTooLong, TemplateError
from engine.handle import RequestHandle
from engine.protocol import ChatBody, CompletionBody
from engine.replies import Shape, number, shape_of
from engine.request import Request, SamplingParams

log = logging.getLogger(__name__)

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]

TRAFFIC_SCHEMA = "inferloop.traffic/1"
DEFAULT_COMPLETION_TOKENS = 16
LOW_MARGIN = 1.0
"""Alternatives are recorded where the top two log-probabilities are closer than this, in nats."""

RECORDED_ALTERNATIVES = 5

LARGE_TEXT = 10_000
"""A prompt of more characters is tokenized on another thread, so that streams are not held up."""


class TrafficMirror(Protocol):
    """Who is told of finished requests; nothing it is told may make it raise or wait."""

    def opening_id(self, tenant: str, messages: Iterable[dict[str, Any]]) -> str | None:
        """The id of a conversation that its client did not name, the same for all its turns."""

    def keeps(self, conversation_id: str) -> bool:
        """Whether this conversation's records are kept: only those are worth making."""

    def offer(self, record: dict[str, Any]) -> None:
        """A finished, failed or cancelled request: the raw fields of `inferloop.traffic/1`."""

    def skip(self, reason: str) -> None:
        """A request without a record: it is not kept, or could not be read."""


@dataclass(frozen=True)
class Service:
    """What all requests of a server share. `fingerprint` is the digest over `components`."""

    engine: Engine
    model_name: str
    template: Template
    fingerprint: str
    components: dict[str, Any]
    mirror: TrafficMirror | None
    ids: RequestIds = field(default_factory=RequestIds)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that the engine has taken: what was asked, where the answer comes from, and how
    it looks. `rendered` is None for a prompt of token ids."""

    body: CompletionBody | ChatBody
    handle: RequestHandle
    shape: Shape
    rendered: str | None


class Exchange:
    """A request being answered. `status` and `error` are what the client was told; `accepted` is
    None until the engine has taken it. Times are `time.monotonic_ns()`, 0: never."""

    def __init__(
        self, service: Service, endpoint: Endpoint, caller: Caller, *, arrival_ns: int
    ) -> None:
        self.service = service
        self.endpoint = endpoint
        self.caller = caller
        self.body_bytes = 0
        self.accepted: Accepted | None = None
        self.status = 200
        self.error: RequestError | None = None
        self.serialized_ns = 0
        self.flushed_ns = 0
        self.chunks: list[dict[str, Any]] = []
        self._arrival_ns = arrival_ns
        self._arrival = datetime.now(UTC)
        self._body: CompletionBody | ChatBody | None = None
        self._conversation_id = caller.conversation or caller.request_id
        self._rendered: str | None = None
        self._prompt_ids: list[int] | None = None
        self._is_mirrored = False

    async def submit(self, body: CompletionBody | ChatBody) -> Accepted:
        """Render, tokenize, resolve the sampling parameters and queue the request. Raises
        `RequestError`."""
        mirror = self.service.mirror
        self._body = body
        self._conversation_id = self._name_conversation(body)
        self._is_mirrored = mirror is not None and mirror.keeps(self._conversation_id)
        try:
            return await self._submit(body)
        except RequestError as error:
            if error.param == "prompt" and isinstance(body, ChatBody):
                error.param = "messages"
            raise

    async def _submit(self, body: CompletionBody | ChatBody) -> Accepted:
        service, caller = self.service, self.caller
        if body.model != service.model_name:
            raise _unknown_model(body.model, service.model_name)
        prompt_ids = self._prompt_ids = await self._tokenize(body)
        request = Request(
            bytes.fromhex(caller.request_id),
            prompt_ids,
            self._resolve(body, prompt_tokens=len(prompt_ids)),
            tenant=caller.tenant,
            route=caller.route,
            class_key=self._class_key(body),
            priority=caller.priority,
            arrival_ns=self._arrival_ns,
            record_top=RECORDED_ALTERNATIVES if self._is_mirrored else 0,
        )
        handle = service.engine.submit(request)
        shape = shape_of(
            body,
            request_id=caller.request_id,
            model=service.model_name,
            fingerprint=service.fingerprint,
            tokenizer=service.engine.tokenizer,
            prompt_ids=prompt_ids,
        )
        self.accepted = Accepted(body, handle, shape, self._rendered)
        return self.accepted

    def _name_conversation(self, body: CompletionBody | ChatBody) -> str:
        """The client's name of the conversation, else one that its other turns get too, else the
        request's: what is not a chat is a conversation of its own."""
        caller, mirror = self.caller, self.service.mirror
        if caller.conversation or mirror is None or not isinstance(body, ChatBody):
            return caller.conversation or caller.request_id
        messages = ({"role": m.role, "content": m.content} for m in body.messages)
        return mirror.opening_id(caller.tenant, messages) or caller.request_id

    def detail(self, accepted: Accepted) -> dict[str, Any]:
        """The extension object for a client that sent X-Inferloop-Detail: 1."""
        request = accepted.handle.request
        return {
            "request_id": self.caller.request_id,
            "rendered_prompt": accepted.rendered,
            "sampling": _sampling(request.params),
            "class_key": request.class_key,
            "fingerprint": self.service.fingerprint,
            "margins": [number(event.margin) for event in accepted.handle.output.events],
            "timings": self._timings(time.monotonic_ns()),
            "priority": request.effective,
        }

    def sent(self, tokens: int) -> None:
        """Note a piece of answer that was handed to the socket."""
        if self._is_mirrored:
            at_ms = (time.monotonic_ns() - self._arrival_ns) / 1e6
            self.chunks.append({"at_ms": at_ms, "tokens": tokens})

    def fail(self, error: RequestError) -> None:
        """Note what the client is told instead of an answer."""
        self.status, self.error = error.status, error

    def finish(self) -> None:
        """The exchange is over: free what is left, count it, offer the traffic record."""
        timings = self._timings(self.flushed_ns or time.monotonic_ns())
        tokens = 0
        if self.accepted is not None:
            handle = self.accepted.handle
            handle.close(serialized_ns=self.serialized_ns, flushed_ns=self.flushed_ns)
            tokens = handle.request.output_len
        self.service.engine.metrics.served(
            operation="chat" if self.endpoint == "/v1/chat/completions" else "text_completion",
            error_type=self._error_type() or "",
            duration_s=timings["duration_ms"] / 1e3,
            ttft_s=None if timings["ttft_ms"] is None else timings["ttft_ms"] / 1e3,
            tokens=tokens,
        )
        self._tell_mirror(timings)

    def _tell_mirror(self, timings: dict[str, Any]) -> None:
        mirror = self.service.mirror
        if mirror is None:
            return
        if self._body is None:
            code = None if self.error is None else self.error.code
            mirror.skip(code or "unreadable")
            return
        if not self._is_mirrored:
            mirror.skip("not_sampled")
            return
        try:
            mirror.offer(self._record(self._body, timings))
        except Exception as error:  # noqa: BLE001 - its message may quote what a person wrote
            kind = type(error).__name__
            log.error("the traffic record of %s was lost: %s", self.caller.request_id, kind)
            mirror.skip("failed")

    async def _tokenize(self, body: CompletionBody | ChatBody) -> list[int]:
        if isinstance(body, CompletionBody) and isinstance(body.prompt, list):
            return body.prompt
        pieces = self._pieces(body)
        self._rendered = "".join(piece.text for piece in pieces)
        self._check_size(self._rendered)
        if len(self._rendered) <= LARGE_TEXT:
            return self._encode(pieces)
        return await asyncio.to_thread(self._encode, pieces)

    def _pieces(self, body: CompletionBody | ChatBody) -> list[Piece]:
        """The prompt's text; in a chat, control tokens count where the template wrote them."""
        if isinstance(body, CompletionBody):
            return [Piece(str(body.prompt), special=False)]
        control_tokens = self.service.engine.tokenizer.control_tokens
        try:
            return render_chat(self.service.template, _content(body)["messages"], control_tokens)
        except TemplateError as error:
            raise RequestError(str(error), param="messages") from error

    def _check_size(self, text: str) -> None:
        """Raises `RequestTooLong` for text that no tokenizer could make fit: tokenizing megabytes
        only to refuse them would cost seconds."""
        engine = self.service.engine
        tokens, longest = engine.scheduler.capacity_tokens(), engine.tokenizer.longest_token
        size = len(text.encode())
        if size > tokens * longest:
            raise RequestTooLong(
                f"the prompt has {size} bytes, more than {tokens} tokens of at most {longest} "
                "bytes can hold: shorten it",
                param="prompt",
            )

    def _encode(self, pieces: list[Piece]) -> list[int]:
        encode = self.service.engine.tokenizer.encode
        return [token for text, special in pieces for token in encode(text, special=special)]

    def _resolve(self, body: CompletionBody | ChatBody, *, prompt_tokens: int) -> SamplingParams:
        """Fill the defaults in. Without a limit, a chat answer may fill the context."""
        room = max(1, self.service.engine.scheduler.capacity_tokens() - prompt_tokens)
        default = room if isinstance(body, ChatBody) else min(room, DEFAULT_COMPLETION_TOKENS)
        return SamplingParams(
            max_tokens=default if body.output_limit is None else body.output_limit,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            seed=secrets.randbits(53) if body.seed is None else body.seed,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.alternatives,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _class_key(self, body: CompletionBody | ChatBody) -> str:
        system = body.system_prompt if isinstance(body, ChatBody) else None
        return class_key(self.caller.tenant, self.caller.route, system)

    def _prompt_text(self) -> str | None:
        """The prompt as the model saw it; of a prompt of token ids their text, without which
        nobody could tell whether they hold personal data."""
        is_known = self._rendered is not None or self._prompt_ids is None
        if is_known or self.accepted is None or not self._is_mirrored:
            return self._rendered
        return self.service.engine.tokenizer.decode(self._prompt_ids)

    def _timings(self, end_ns: int) -> dict[str, Any]:
        def since_arrival(at_ns: int) -> float | None:
            return (at_ns - self._arrival_ns) / 1e6 if at_ns else None

        request = None if self.accepted is None else self.accepted.handle.request
        return {
            "queue_ms": None if request is None else since_arrival(request.admitted_ns),
            "ttft_ms": None if request is None else since_arrival(request.first_token_ns),
            "duration_ms": (end_ns - self._arrival_ns) / 1e6,
        }

    def _error_type(self) -> str | None:
        if isinstance(self.error, RequestAborted):
            return "cancelled"
        return None if self.error is None else self.error.code or self.error.kind

    def _record(self, body: CompletionBody | ChatBody, timings: dict[str, Any]) -> dict[str, Any]:
        """The request as one line of `inferloop.traffic/1`."""
        caller, accepted = self.caller, self.accepted
        params = (
            self._resolve(body, prompt_tokens=0)
            if accepted is None
            else accepted.handle.request.params
        )
        return {
            "schema": TRAFFIC_SCHEMA,
            "request_id": caller.request_id,
            "conversation_id": self._conversation_id,
            "arrival": self._arrival.isoformat(timespec="microseconds"),
            "arrival_ns": self._arrival_ns,
            "endpoint": self.endpoint,
            "stream": bool(body.stream),
            "tenant": caller.tenant,
            "route": caller.route,
            "class_key": self._class_key(body),
            "priority": caller.priority,
            "model": body.model,
            **_content(body),
            "prompt_token_ids": self._prompt_ids,
            "rendered_prompt": self._prompt_text(),
            "sampling": _sampling(params),
            "sampling_set": _set_by_client(body),
            "status": self.status,
            "error_type": self._error_type(),
            **timings,
            **({} if accepted is None else _answer(accepted.handle)),
            "chunks": self.chunks,
            "fingerprint": self.service.fingerprint,
            "client": caller.client,
            "headers": caller.headers,
            "original_bytes": self.body_bytes,
        }


def _answer(handle: RequestHandle) -> dict[str, Any]:
    """The record's fields about the output, as far as it got."""
    request, events = handle.request, list(handle.output.events)
    return {
        "output_text": "".join(event.text for event in events),
        "output_token_ids": [event.token_id for event in events],
        "logprobs": [number(event.logprob) for event in events],
        "margins": [number(event.margin) for event in events],
        "top": [
            {
                "position": position,
                "token_ids": [item.token_id for item in event.top],
                "logprobs": [number(item.logprob) for item in event.top],
            }
            for position, event in enumerate(events)
            if event.top and event.margin < LOW_MARGIN
        ],
        "finish_reason": handle.output.finish_reason,
        "usage": {
            "prompt_tokens": request.prompt_len,
            "completion_tokens": len(events),
            "cached_tokens": max(0, request.cached_tokens),
        },
    }


def _content(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """What the client sent: messages, or a prompt in text."""
    if isinstance(body, ChatBody):
        return {"messages": [m.model_dump(include={"role", "content"}) for m in body.messages]}
    return {"prompt": body.prompt if isinstance(body.prompt, str) else None}


def _unknown_model(asked: str, served: str) -> RequestError:
    error = RequestError(f"model {asked[:80]!r} is not served here: use {served!r}", param="model")
    error.status, error.code = 404, "model_not_found"
    return error


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The fields of `capture.traffic.Sampling`."""
    fields = asdict(params)
    del fields["logprobs"], fields["prompt_logprobs"]
    return fields | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}


def _set_by_client(body: CompletionBody | ChatBody) -> list[str]:
    """Sampling parameters that the client set itself, by their names in the record."""
    names = ("temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos")
    chosen = [name for name in names if getattr(body, name) not in (None, [])]
    return ["max_tokens", *chosen] if body.output_limit is not None else chosen
