"""How a request ended, in the words of the trace, the metrics and the traffic record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from capture.proxy.answer import Answer

CLIENT_GONE_STATUS = 499
BROKEN_STREAM_STATUS = 502

SUCCESSES = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "stop_sequence": "stop",
    "tool_calls": "stop", "function_call": "stop", "length": "length", "max_tokens": "length",
}  # fmt: skip
"""Finish reasons of servers, and which of the trace's two successes each is."""


class Outcome(Enum):
    """How an exchange ended on the wire; the values are error types, "" for none."""

    COMPLETE = ""
    CLIENT_GONE = "cancelled"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    STOPPED = "proxy_stopped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`status` as a traffic record has it; `reason` as a FINISH frame has it: stop, length, abort,
    error or another of the server's own."""

    status: int
    error_type: str | None
    reason: str

    @property
    def succeeded(self) -> bool:
        return self.error_type is None


def judge(outcome: Outcome, told: int, answer: Answer, *, streamed: bool, known: bool) -> Verdict:
    """`told`: the status the client saw, 0: none; `known`: the answer could be read."""
    if outcome is Outcome.CLIENT_GONE:
        return Verdict(CLIENT_GONE_STATUS, outcome.value, "abort")
    if outcome is not Outcome.COMPLETE:
        return Verdict(told if told >= 400 else BROKEN_STREAM_STATUS, outcome.value, "error")
    if told >= 400:
        return Verdict(told, answer.error_type or f"http_{told}", "error")
    if answer.error_type is not None:
        return Verdict(BROKEN_STREAM_STATUS, answer.error_type, "error")
    if known and answer.finish_reason is None and not (streamed and answer.done):
        return Verdict(BROKEN_STREAM_STATUS, "incomplete", "error")
    reason = answer.finish_reason or "stop"
    return Verdict(told, None, SUCCESSES.get(reason, reason))
