"""Who asks and how: what the server reads from a request's headers."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from engine.errors import RequestError
from engine.request import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY

KEPT_HEADERS = frozenset({"user-agent", "x-priority", "x-tenant", "x-route", "x-conversation"})
"""Headers that a traffic record may hold; never credentials or cookies."""

MAX_KEPT_CHARS = 256
MAX_CONVERSATION_CHARS = 128
RECENT_IDS = 65_536

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Caller:
    """`request_id` 32 hex digits; `traceparent` is the header to answer with; `conversation` is
    the client's name of it, None when it gave none."""

    request_id: str
    traceparent: str
    priority: int
    tenant: str
    route: str
    conversation: str | None
    detail: bool
    client: str | None
    headers: dict[str, str]


class RequestIds:
    """Gives every request its id: the trace id it came with, unless that was used before (a trace
    may hold several requests), then a new one."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, None] = OrderedDict()

    def assign(self, trace_id: str | None) -> str:
        request_id = trace_id
        while request_id is None or request_id in self._recent:
            request_id = secrets.token_hex(16)
        self._recent[request_id] = None
        if len(self._recent) > RECENT_IDS:
            self._recent.popitem(last=False)
        return request_id


def read_caller(
    headers: Mapping[str, str], *, default_route: str, client: str | None, ids: RequestIds
) -> Caller:
    """Read the headers. Raises `RequestError` (400) naming the header that is not valid; a
    traceparent that is not valid is ignored, as W3C Trace Context requires."""
    trace_id, flags = _trace(headers.get("traceparent"))
    request_id = ids.assign(trace_id)
    conversation = headers.get("x-conversation") or ""
    if len(conversation) > MAX_CONVERSATION_CHARS or not conversation.isprintable():
        raise RequestError(
            f"X-Conversation has {len(conversation)} characters: at most "
            f"{MAX_CONVERSATION_CHARS} printable ones are allowed",
            param="X-Conversation",
        )
    return Caller(
        request_id=request_id,
        traceparent=f"00-{trace_id or request_id}-{secrets.token_hex(8)}-{flags}",
        priority=_priority(headers.get("x-priority")),
        tenant=_name(headers.get("x-tenant"), "X-Tenant", "default"),
        route=_name(headers.get("x-route"), "X-Route", default_route),
        conversation=conversation or None,
        detail=headers.get("x-inferloop-detail") == "1",
        client=client,
        headers={k: headers[k][:MAX_KEPT_CHARS] for k in sorted(KEPT_HEADERS) if k in headers},
    )


def class_key(tenant: str, route: str, system_prompt: str | None) -> str:
    """The request's class: "tenant/route/template", template being the first 8 hex digits of the
    system prompt's xxh3-64, or "-"."""
    template = xxhash.xxh3_64_hexdigest(system_prompt.encode())[:8] if system_prompt else "-"
    return f"{tenant}/{route}/{template}"


def _trace(header: str | None) -> tuple[str | None, str]:
    found = _TRACEPARENT.fullmatch(header.strip()) if header else None
    if found is None:
        return None, "01"
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return None, "01"
    if not int(trace_id, 16) or not int(span_id, 16):
        return None, "01"
    return trace_id, flags


def _priority(header: str | None) -> int:
    if header is None:
        return DEFAULT_PRIORITY
    if not re.fullmatch(r"\d{1,3}", header.strip(), re.ASCII) or int(header) > MAX_PRIORITY:
        raise RequestError(
            f"X-Priority is {header[:20]!r}: expected a whole number within "
            f"{MIN_PRIORITY}..{MAX_PRIORITY}, larger is served first",
            param="X-Priority",
        )
    return int(header)


def _name(header: str | None, name: str, default: str) -> str:
    if header is None:
        return default
    if not _NAME.fullmatch(header):
        raise RequestError(
            f"{name} is {header[:80]!r}: expected 1 to 64 letters, digits, '.', '_' or '-'",
            param=name,
        )
    return header
