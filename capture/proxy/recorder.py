"""What all captured requests of a proxy share: trace, mirror, metrics, limits.

`observe` decides whether a request is captured. Not for reading bodies
(`capture.proxy.observation`).
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from capture.errors import place_of
from capture.frames import NONE, TraceWriter
from capture.proxy.body import Budget
from capture.proxy.caller import Caller, RequestIds, read_caller
from capture.proxy.messages import Headers, RequestHead, values_of
from capture.proxy.observation import Observation
from capture.proxy.offwire import OffWire
from capture.proxy.outcome import Verdict
from capture.proxy.question import Question
from capture.proxy.record import class_key, traffic_record
from capture.proxy.trace import ProxyTrace

if TYPE_CHECKING:
    from capture.mirroring.mirror_process import MirrorProcess
    from capture.proxy.metrics import ProxyMetrics

log = logging.getLogger("inferloop.proxy")

NAME_CHARS = 256
"""Of a name that are kept for the ENGINE frame: a model's may be what any client wrote."""

COPIES_BYTES = 256 << 20
"""Bodies of all requests in flight that are kept for the capture; past it they are cut."""


class Recorder:
    """`engine_info` describes the proxy in its ENGINE frame, which is written as soon as something
    is known of the upstream. `body_bytes`: of a request or an answer that are kept."""

    def __init__(
        self,
        metrics: ProxyMetrics,
        writer: TraceWriter | None,
        mirror: MirrorProcess | None,
        *,
        engine_info: dict[str, Any],
        body_bytes: int,
    ) -> None:
        self.metrics = metrics
        self.trace = ProxyTrace(writer)
        metrics.watch_trace(self.trace)
        self.offwire = OffWire(self._after_turn)
        self.budget = Budget(COPIES_BYTES)
        self.body_bytes = body_bytes
        self.running = self.waiting = 0
        self._mirror = mirror
        self._info: dict[str, Any] | None = engine_info
        self._ids = RequestIds()
        self._has_failed = False

    def conversation_id(self, caller: Caller, question: Question) -> str:
        """By the rule of our engine's server: the client's name of it, else one that the other
        turns of a chat get too, else the request's."""
        name = caller.conversation
        if name is None and self._mirror is not None and question.messages:
            name = self._mirror.opening_id(caller.tenant, question.messages)
        return name or caller.request_id

    def is_mirrored(self, conversation_id: str) -> bool:
        return self._mirror is not None and self._mirror.keeps(conversation_id)

    def observe(self, head: RequestHead, client: str | None, arrival_ns: int) -> Observation | None:
        """Someone to show the request to; None when it is of no kind that is captured."""
        if head.method != b"POST" or not head.path.endswith(b"/completions"):
            return None
        chat = head.path.endswith(b"/chat/completions")
        route = "chat" if chat else "completions"
        caller = read_caller(head.headers, default_route=route, client=client, ids=self._ids)
        self.running += 1
        self.waiting += 1
        return Observation(self, head, caller, chat=chat, arrival_ns=arrival_ns)

    def describe(self, headers: Headers | None, model: str, **more: Any) -> None:
        """Write the ENGINE frame, once: `headers` of an answer of the upstream, None: none yet."""
        if self._info is None:
            return
        server = values_of(headers or (), b"server")
        name = server[0].decode("latin-1")[:NAME_CHARS] if server else None
        info = self._info | {"model": model[:NAME_CHARS] or None, "upstream_server": name} | more
        self._info = None
        self.trace.write(lambda writer: writer.engine(info))

    def began(self, seen: Observation) -> None:
        """A request was read: its REQUEST frame."""
        caller, question = seen.caller, seen.question
        ids = question.prompt_token_ids
        seen.is_traced = True
        self.trace.write(
            lambda writer: writer.request(
                request_id=bytes.fromhex(caller.request_id),
                slot=seen.slot,
                arrival_ns=seen.time.arrival_ns,
                prompt_tokens=NONE if ids is None else len(ids),
                cached_tokens=NONE,
                max_tokens=question.sampling.get("max_tokens", NONE),
                priority=caller.priority,
                adjustment=0,
                tenant=caller.tenant,
                route=caller.route,
                class_key=class_key(seen),
            )
        )

    def ended(self, seen: Observation, verdict: Verdict, detail: str) -> None:
        """Everything that is known of a request is known."""
        self.running -= 1
        self.waiting -= not seen.has_token
        if not seen.is_traced:
            self.began(seen)
        self._flush()
        self._trace_end(seen, verdict, detail)
        self.metrics.answered(seen.time, seen.answer, verdict)
        if seen.question.unsupported and not seen.skipped:
            self.metrics.skipped(seen.question.unsupported)
        self._tell_mirror(seen, verdict)

    def _tell_mirror(self, seen: Observation, verdict: Verdict) -> None:
        why = seen.skipped or seen.question.unsupported
        if self._mirror is None:
            return
        if why:
            self._mirror.skip(why)
        elif not seen.is_mirrored:
            self._mirror.skip("not_sampled")
        else:
            self._mirror.offer(traffic_record(seen, verdict))

    def failed(self, request_id: str) -> None:
        """An error of ours that is being handled; the first one is logged with its place, without
        its message: that may quote what a person wrote."""
        if not self._has_failed:
            self._has_failed = True
            error = sys.exception()
            place = "" if error is None else place_of(error)
            log.error("capturing %s failed, forwarding goes on: %s", request_id, place)

    def finish(self) -> None:
        """Do what is left before the ring and the mirror are closed."""
        self.offwire.finish()
        self.describe(None, "")

    def _trace_end(self, seen: Observation, verdict: Verdict, detail: str) -> None:
        answer, time = seen.answer, seen.time
        if verdict.reason == "abort":
            self._event("aborted", seen, "by the client")
        elif detail:
            self._event("upstream_error", seen, detail)
        if seen.skipped:
            why = f"{seen.skipped}: {seen.skipped_why}" if seen.skipped_why else seen.skipped
            self._event("not_captured", seen, f"its tokens are not counted: {why}")
        if answer.usage is not None:
            self._event("usage", seen, json.dumps(answer.usage))
        if seen.rows and (answer.counted_by == "chunks" or seen.rows != answer.output_tokens):
            self._event("tokens_per_chunk", seen, _counting(seen))
        self.trace.write(
            lambda writer: writer.finish(
                slot=seen.slot,
                reason=verdict.reason,
                output_tokens=answer.output_tokens,
                admitted_ns=0,
                first_token_ns=time.first_ns,
                last_token_ns=time.last_ns,
                detokenized_ns=0,
                serialized_ns=0,
                flushed_ns=time.end_ns,
            )
        )

    def _event(self, kind: str, seen: Observation, detail: str) -> None:
        request_id = bytes.fromhex(seen.caller.request_id)
        self.trace.write(
            lambda writer: writer.event(
                kind=kind, request_id=request_id, slot=seen.slot, detail=detail
            )
        )

    def _after_turn(self) -> None:
        try:
            self._flush()
        except Exception:  # noqa: BLE001 - forwarding must not depend on the capture
            self.failed("-")

    def _flush(self) -> None:
        self.trace.flush(running=self.running, waiting=self.waiting)


def _counting(seen: Observation) -> str:
    answer = seen.answer
    if answer.usage is None:
        return f"{seen.rows} chunks counted as a token each: the upstream gave no count"
    return f"{answer.output_tokens} tokens by usage came in {seen.rows} chunks"
