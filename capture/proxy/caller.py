"""Who asks, from a request's headers: the rules of our engine's server, without its refusals.

A header that is not valid counts as not sent: whether a request is good is the upstream's to say.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from capture.proxy.messages import Headers

KEPT_HEADERS = frozenset({"user-agent", "x-priority", "x-tenant", "x-route", "x-conversation"})
MAX_KEPT_CHARS = 256
MAX_CONVERSATION_CHARS = 128
DEFAULT_PRIORITY = 50
RECENT_IDS = 65_536

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


@dataclass(frozen=True, slots=True)
class Caller:
    """`request_id` 32 hex digits; `conversation` is the client's name of it, None when it gave
    none; `headers` are those a traffic record may hold."""

    request_id: str
    conversation: str | None
    tenant: str
    route: str
    priority: int
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
    headers: Headers, *, default_route: str, client: str | None, ids: RequestIds
) -> Caller:
    """Read the headers; the first of several of one name counts."""
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "replace"))
    request_id = ids.assign(trace_id_of(found.get("traceparent")))
    conversation = found.get("x-conversation", "")
    if len(conversation) > MAX_CONVERSATION_CHARS or not conversation.isprintable():
        conversation = ""
    return Caller(
        request_id=request_id,
        conversation=conversation or None,
        tenant=_name(found.get("x-tenant"), "default"),
        route=_name(found.get("x-route"), default_route),
        priority=_priority(found.get("x-priority")),
        client=client,
        headers={k: found[k][:MAX_KEPT_CHARS] for k in sorted(KEPT_HEADERS) if k in found},
    )


def trace_id_of(header: str | None) -> str | None:
    """The trace id of a W3C traceparent; None when it is not valid."""
    match = _TRACEPARENT.fullmatch(header.strip()) if header else None
    if match is None:
        return None
    version, trace_id, span_id, rest = match.groups()
    is_valid = version != "ff" and not (version == "00" and rest)
    return trace_id if is_valid and int(trace_id, 16) and int(span_id, 16) else None


def _priority(header: str | None) -> int:
    if header is None or not re.fullmatch(r"\d{1,3}", header.strip(), re.ASCII):
        return DEFAULT_PRIORITY
    return min(int(header), 100)


def _name(header: str | None, default: str) -> str:
    return header if header is not None and _NAME.fullmatch(header) else default
