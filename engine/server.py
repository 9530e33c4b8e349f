"""The OpenAI-compatible HTTP server in front of an engine.

Routes and nothing else: bodies are read by `engine.protocol`, answers sent by `engine.answers`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.answers import JSON, Answer, Refusal
from engine.caller import read_caller
from engine.chat_prompt import Template
from engine.core import Engine
from engine.errors import RequestError
from engine.exchange import Endpoint, Exchange, Service, TrafficMirror
from engine.exposition import render
from engine.fingerprint import digest_of
from engine.marks import Marks
from engine.protocol import ChatBody, CompletionBody, parse_body
from engine.replies import encode

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
MAX_SWALLOWED_BYTES = 64 << 20
"""A body over the limit is read up to here, and thrown away, so that its sender sees the answer."""

DEFAULT_ROUTES: dict[Endpoint, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
}
AnyBody = CompletionBody | ChatBody

STALLED_S = 60.0
DRAIN_S = 30.0


BODY_S = 60.0
"""A request's body must be complete this long after its headers."""


class BodyTooSlow(RequestError):
    """The request's body did not arrive in time."""

    status = 408
    code = "body_too_slow"


class BodyTooLarge(RequestError):
    """The request's body exceeds the server's limit."""

    status = 413
    code = "body_too_large"


def create_app(
    engine: Engine,
    *,
    model_name: str,
    template: Template,
    fingerprint: dict[str, Any],
    mirror: TrafficMirror | None = None,
    marks: Marks | None = None,
) -> FastAPI:
    """The application. It starts the engine with the server and drains it at shutdown.

    `fingerprint` holds the build's components; its digest is the `system_fingerprint` of answers.
    `mirror` is told of every request, failed and cancelled ones included.
    `marks` takes operators' marks; without it there is nowhere to put them.
    """
    service = Service(
        engine=engine,
        model_name=model_name,
        template=template,
        fingerprint=digest_of(fingerprint),
        components=fingerprint,
        mirror=mirror,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop, timeout_s=DRAIN_S)

    app = FastAPI(title="inferloop", lifespan=lifespan)
    _add_openai_routes(app, service)
    _add_operator_routes(app, service)
    _add_marks_route(app, marks or Marks(None, from_anywhere=False))
    _add_error_handlers(app)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    model = {
        "id": service.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "inferloop",
        "max_model_len": service.engine.scheduler.capacity_tokens(),
    }

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionBody, "/v1/completions"))
    async def completions(http: Request) -> Response:
        """Continue a prompt."""
        return await _answer(service, "/v1/completions", partial(parse_body, CompletionBody), http)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody, "/v1/chat/completions"))
    async def chat_completions(http: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, "/v1/chat/completions", partial(parse_body, ChatBody), http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def model_by_name(name: str) -> dict[str, Any]:
        """That model, by name."""
        if name != service.model_name:
            raise HTTPException(404, f"model {name[:80]!r} is not served here")
        return model


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    engine = service.engine
    watch = engine.metrics.watch
    watch("engine_up", "1 while the engine takes requests.", lambda: float(engine.alive))
    watch("trace_stopped", "1 when tracing failed.", lambda: float(bool(engine.trace_failure)))

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine's thread takes requests and its steps end in time, else 503."""
        status = _health(engine)
        body = {
            "status": status,
            "reason": engine.failure,
            "trace_failure": engine.trace_failure,
            "running": engine.scheduler.running,
            "waiting": len(engine.scheduler.waiting),
            "kv_blocks_used": engine.pool.used,
            "kv_blocks": engine.pool.num_blocks,
        }
        return Response(encode(body), 200 if status == "ok" else 503, media_type=JSON)

    @app.get("/metrics")
    async def metrics(http: Request) -> Response:
        """Prometheus metrics; in OpenMetrics' format, when asked for, with exemplars."""
        data, kind = render(engine.metrics.registry, http.headers.get("accept", ""))
        return Response(data, headers={"content-type": kind})

    @app.get("/inferloop/build")
    async def build() -> dict[str, Any]:
        """What identifies this build: two servers with the same fingerprint answer alike."""
        return {"fingerprint": service.fingerprint, "components": service.components}


def _add_marks_route(app: FastAPI, marks: Marks) -> None:
    @app.post("/inferloop/marks")
    async def mark(http: Request) -> Response:
        """Set a mark in the trace: {"text": "deploy 7"}."""
        try:
            text = marks.take(
                await _read_body(http),
                client=http.client.host if http.client else None,
                content_type=http.headers.get("content-type", ""),
            )
        except RequestError as error:
            return _closing(Refusal(error))
        except ClientDisconnect:
            return Response(status_code=499)
        return Response(encode({"text": text}), media_type=JSON)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        refusal = RequestError(f"{http.method} {http.url.path}: {error.detail}")
        refusal.status = error.status_code
        return Refusal(refusal)

    @app.exception_handler(Exception)
    async def fault(http: Request, error: Exception) -> Response:
        refusal = RequestError("the server failed on this request; its log says why")
        refusal.status, refusal.kind = 500, "server_error"
        return _closing(Refusal(refusal))  # uvicorn closes after any fault


async def _answer(
    service: Service, endpoint: Endpoint, read: Callable[[bytes], AnyBody], http: Request
) -> Response:
    arrival_ns = time.monotonic_ns()
    exchange = None
    try:
        caller = read_caller(
            http.headers,
            default_route=DEFAULT_ROUTES[endpoint],
            client=http.client.host if http.client else None,
            ids=service.ids,
        )
        exchange = Exchange(service, endpoint, caller, arrival_ns=arrival_ns)
        data = await _read_body(http)
        exchange.body_bytes = len(data)
        return Answer(exchange, await exchange.submit(read(data)))
    except BodyTooSlow as error:
        return _closing(Refusal(error, exchange))
    except RequestError as error:
        if exchange is None and service.mirror is not None:
            service.mirror.skip("unreadable")
        return Refusal(error, exchange)
    except ClientDisconnect:
        if service.mirror is not None:
            service.mirror.skip("client_gone")
        return Response(status_code=499)


def _closing(answer: Response) -> Response:
    """Let the connection end with this answer."""
    answer.headers["connection"] = "close"
    return answer


async def _read_body(http: Request) -> bytes:
    """The whole body. Raises `BodyTooLarge` and `BodyTooSlow`."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                size += len(part)
                if size <= MAX_BODY_BYTES:
                    parts.append(part)
                elif size > MAX_SWALLOWED_BYTES:
                    break
    except TimeoutError as error:
        raise BodyTooSlow(
            f"{size} bytes of the body came in {BODY_S:.0f} s, not all: send it faster"
        ) from error
    if size > MAX_BODY_BYTES:
        raise BodyTooLarge(
            f"the body has {size} bytes or more, the limit is {MAX_BODY_BYTES}: "
            "send a shorter prompt"
        )
    return b"".join(parts)


def _health(engine: Engine) -> str:
    if engine.failure is not None:
        return "failed"
    if engine.draining:
        return "draining"
    if not engine.alive:
        return "stopped"
    return "stalled" if engine.step_seconds > STALLED_S else "ok"


def _body_schema(kind: type[AnyBody], path: Endpoint) -> dict[str, Any]:
    """The body's JSON schema for /docs; the body itself is read by `parse_body`."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=place + "/$defs/{model}")
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}
