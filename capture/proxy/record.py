"""A captured request as one line of `inferloop.traffic/1`.

What the server resolved and did not say is filled with the API's defaults; `sampling_set` tells
what the client set. Not for redaction: the mirror does that.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capture.proxy.outcome import Verdict
from capture.traffic import SCHEMA

if TYPE_CHECKING:
    from capture.proxy.observation import Observation

API_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}


@dataclass(frozen=True, slots=True)
class Series:
    """A time in ns for each chunk of an answer, and how many tokens it brought: small to keep and
    to hand over, where a record has an object each."""

    ns: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.ns)

    def add(self, ns: int, tokens: int) -> None:
        self.ns.append(ns)
        self.tokens.append(tokens)

    def written(self, arrival_ns: int) -> list[dict[str, Any]]:
        """When each chunk came, as a traffic record says it."""
        pairs = zip(self.ns, self.tokens, strict=True)
        return [{"at_ms": (at - arrival_ns) / 1e6, "tokens": count} for at, count in pairs]


def traffic_record(seen: Observation, verdict: Verdict) -> dict[str, Any]:
    """The fields of `capture.traffic.TrafficRecord`; `chunks` as a `Series`."""
    question, answer, caller, time = seen.question, seen.answer, seen.caller, seen.time
    limit = {"max_tokens": max(1, answer.output_tokens)}
    return {
        "schema": SCHEMA,
        "request_id": caller.request_id,
        "conversation_id": seen.conversation_id,
        "arrival": time.arrival.isoformat(timespec="microseconds"),
        "arrival_ns": time.arrival_ns,
        "endpoint": "/v1/chat/completions" if seen.chat else "/v1/completions",
        "stream": question.stream,
        "tenant": caller.tenant,
        "route": caller.route,
        "class_key": class_key(seen),
        "priority": caller.priority,
        "model": question.model or answer.model,
        "messages": question.messages,
        "prompt": question.prompt,
        "prompt_token_ids": question.prompt_token_ids or answer.prompt_token_ids,
        "sampling": API_DEFAULTS | limit | question.sampling,
        "sampling_set": list(question.sampling),
        "status": verdict.status,
        "error_type": verdict.error_type,
        "ttft_ms": (time.first_ns - time.arrival_ns) / 1e6 if time.first_ns else None,
        "duration_ms": (time.end_ns - time.arrival_ns) / 1e6,
        **_answered(seen),
        "chunks": time.chunks,
        "fingerprint": answer.fingerprint,
        "client": caller.client,
        "headers": caller.headers,
        "original_bytes": seen.request_bytes,
        "truncated": seen.is_cut or answer.truncated,
    }


def class_key(seen: Observation) -> str:
    """The class that feedback applies to: tenant/route/template."""
    return f"{seen.caller.tenant}/{seen.caller.route}/{seen.question.template}"


def _answered(seen: Observation) -> dict[str, Any]:
    """The fields about the output, as far as it got."""
    answer = seen.answer
    if not answer.text and answer.usage is None and not answer.tokens:
        return {}
    whole = len(answer.token_ids) == answer.output_tokens and not answer.truncated
    whole &= not answer.has_other_text  # nobody could tell what personal data they hold
    return {
        "output_text": "".join(answer.text),
        "output_token_ids": answer.token_ids if whole else None,
        "logprobs": answer.logprobs if len(answer.logprobs) == answer.output_tokens else None,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "tokens_counted_by": answer.counted_by,
    }
