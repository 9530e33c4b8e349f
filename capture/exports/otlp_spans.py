"""Finished requests as OpenTelemetry spans: one per request, children for its phases.

The trace id is the request id, so a span joins its caller's trace; the caller's span id is not
kept, so it joins as a root. Ids follow from the record: sent twice, a span is the same span. Never
holds what clients or the model wrote.
"""

from __future__ import annotations

import hashlib
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from capture.exports import genai

Row = dict[str, Any]
SCOPE = InstrumentationScope("inferloop")
SUCCESS = ("stop", "length")
PHASES = (
    ("queue", "arrived_us", "admitted_us"),
    ("prefill", "admitted_us", "first_token_us"),
    ("decode", "first_token_us", "last_token_us"),
    ("send", "last_token_us", "flushed_us"),
)


def resource_of(row: Row) -> Resource:
    """The engine process that served the request."""
    return Resource(
        {
            "service.name": genai.PROVIDER,
            "service.instance.id": row["engine_id"],
            "host.name": row["host"] or "unknown",
            "process.pid": row["pid"] or 0,
            "inferloop.build.fingerprint": row["fingerprint"] or "unknown",
        }
    )


def operation_of(row: Row) -> str:
    """`chat` or `text_completion`, as far as the route says."""
    return genai.TEXT_COMPLETION if row["route"] == "completions" else genai.CHAT


def spans_of(row: Row, events: list[Row], resource: Resource) -> list[ReadableSpan]:
    """The request's span and those of its phases.

    `row`: a finished request with times in us since 1970; `events`: its preemptions and slow
    tokens, each with `at_us`, `name` and `attributes`.
    """
    trace_id = int(row["request_id"], 16)
    root = _context(trace_id, row, "request")
    failed = row["reason"] not in SUCCESS
    spans = [
        ReadableSpan(
            name=f"{operation_of(row)} {row['model'] or 'unknown'}",
            context=root,
            resource=resource,
            attributes=_attributes(row, failed=failed),
            events=[_event(event) for event in events],
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, row["reason"]) if failed else Status(StatusCode.UNSET),
            start_time=row["arrived_us"] * 1000,
            end_time=_end_us(row) * 1000,
            instrumentation_scope=SCOPE,
        )
    ]
    for name, start, end in PHASES:
        if row[start] is None or row[end] is None:
            continue
        spans.append(
            ReadableSpan(
                name=name,
                context=_context(trace_id, row, name),
                parent=root,
                resource=resource,
                kind=SpanKind.INTERNAL,
                start_time=row[start] * 1000,
                end_time=max(row[end], row[start]) * 1000,
                instrumentation_scope=SCOPE,
            )
        )
    return spans


def _attributes(row: Row, *, failed: bool) -> dict[str, Any]:
    attributes = {
        genai.OPERATION_NAME: operation_of(row),
        genai.PROVIDER_NAME: genai.PROVIDER,
        genai.REQUEST_MODEL: row["model"],
        genai.REQUEST_MAX_TOKENS: row["max_tokens"],
        genai.RESPONSE_MODEL: row["model"],
        genai.USAGE_INPUT_TOKENS: row["prompt_tokens"],
        genai.USAGE_OUTPUT_TOKENS: row["output_tokens"],
        genai.USAGE_CACHE_READ_INPUT_TOKENS: row["cached_tokens"],
        genai.SERVER_ADDRESS: row["host"],
        "inferloop.slot": row["slot"],
        "inferloop.tenant": row["tenant"],
        "inferloop.route": row["route"],
        "inferloop.class_key": row["class_key"],
        "inferloop.priority": row["priority"],
    }
    if failed:
        attributes[genai.ERROR_TYPE] = row["reason"]
    else:
        attributes[genai.RESPONSE_FINISH_REASONS] = (row["reason"],)
        if row["first_token_us"] is not None:
            waited_us = row["first_token_us"] - row["arrived_us"]
            attributes[genai.RESPONSE_TIME_TO_FIRST_CHUNK] = waited_us / 1e6
    return {name: value for name, value in attributes.items() if value is not None}


def _end_us(row: Row) -> int:
    return int(max(row["flushed_us"] or row["finished_us"], row["arrived_us"]))


def _event(event: Row) -> Event:
    return Event(event["name"], event["attributes"], timestamp=event["at_us"] * 1000)


def _context(trace_id: int, row: Row, part: str) -> SpanContext:
    key = f"{row['engine_id']} {row['slot']} {part}"
    digest = hashlib.blake2s(key.encode(), digest_size=8).digest()
    span_id = int.from_bytes(digest, "big") or 1
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))
