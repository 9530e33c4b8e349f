"""Writes what the engine does into the trace: one call per step, columns for its rows.

A trace that cannot be written is given up, loudly once, and never stops the engine. Not for the
frames' layout: that is `capture.frames`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from capture.frames import TraceWriter
from engine.batch import StepBatch, StepResult
from engine.gc_watch import GcWatch, Pause
from engine.handle import RequestHandle
from engine.request import Request
from engine.seats import Seats
from engine.step import Step

log = logging.getLogger(__name__)

FIRST_TOKEN, NO_TOKEN = 1, 2
"""Phases of a step's rows, besides 0 for a decoded token; NO_TOKEN is a prefill chunk that is not
the prompt's last."""

TOKEN_NONE = 0xFFFFFFFF

_Method = TypeVar("_Method", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of a step besides its rows. Counts are those while the step ran; KV figures
    are in blocks."""

    step_id: int
    start_ns: int
    schedule_us: float
    running: int
    waiting: int
    kv_used: int
    kv_total: int


def _guarded(method: _Method) -> _Method:
    """Give tracing up at the first error: the engine must not depend on its trace."""

    @functools.wraps(method)
    def call(self: StepTracer, *args: Any, **kwargs: Any) -> None:
        if self.failure is not None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.exception("tracing stopped, serving goes on")

    return cast("_Method", call)


class StepTracer:
    """Turns the engine's steps into `TraceWriter` calls, all from the engine's thread.

    `failure` says why tracing has stopped, None while it works.
    """

    def __init__(self, writer: TraceWriter) -> None:
        self.failure: str | None = None
        self._writer = writer
        self._gc_watch: GcWatch | None = None

    def watch_gc(self, defer: Callable[[Callable[[], None]], None]) -> None:
        """Trace garbage collection pauses until `close`. `defer` lets the engine's thread make a
        call soon, and is safe inside a collection: the ring's lock may be held at that moment."""
        self._gc_watch = GcWatch(lambda pause: defer(partial(self._gc_pause, pause)))
        self._gc_watch.start()

    def close(self) -> None:
        """The engine has ended: watch nothing any more."""
        if self._gc_watch is not None:
            self._gc_watch.stop()

    @_guarded
    def engine(self, info: dict[str, Any]) -> None:
        self._writer.engine(info)

    @_guarded
    def request(self, request: Request) -> None:
        """Once a request: when it is first admitted, or when it ends without having been."""
        self._writer.request(
            request_id=request.request_id,
            slot=request.slot,
            arrival_ns=request.arrival_ns,
            prompt_tokens=request.prompt_len,
            cached_tokens=max(0, request.cached_tokens),
            max_tokens=request.params.max_tokens,
            priority=request.priority,
            adjustment=request.adjustment,
            tenant=request.tenant,
            route=request.route,
            class_key=request.class_key,
        )

    @_guarded
    def queued(self, request: Request, now_ns: int, *, running: int, waiting: int) -> None:
        """A new request that waits, beside those that run and wait. `waited_us` dates its arrival;
        names hold no spaces, so each part can be told (`capture.why.lookup` does)."""
        self.event(
            "queued",
            f"waited_us={(now_ns - request.arrival_ns) // 1000} running={running} "
            f"waiting={waiting} priority={request.priority} adjustment={request.adjustment} "
            f"prompt_tokens={request.prompt_len} max_tokens={request.params.max_tokens} "
            f"tenant={request.tenant} class={request.class_key}",
            request,
        )

    @_guarded
    def step(
        self,
        step: Step,
        seats: Seats,
        rows: np.ndarray,
        batch: StepBatch,
        result: StepResult,
        latency_us: np.ndarray,
        facts: StepFacts,
    ) -> None:
        """A computed step, before it is committed. `rows` is the seat of each row; `latency_us`
        float32 [R] the time since each request's previous token (its arrival for the first)."""
        positions = batch.context_lens - seats.prompt_len[rows]
        phases = np.zeros(len(rows), np.uint32)
        token_ids = result.token_ids
        if step.chunks:
            token_ids = token_ids.copy()
            for row, chunk in enumerate(step.chunks, start=len(step.decodes)):
                if not chunk.last:
                    phases[row], token_ids[row] = NO_TOKEN, TOKEN_NONE
                    positions[row] = chunk.start + chunk.length - 1
                elif positions[row] == 0:
                    phases[row] = FIRST_TOKEN
        self._writer.step(
            step_id=facts.step_id,
            start_ns=facts.start_ns,
            schedule_us=facts.schedule_us,
            prepare_us=result.prepare_us,
            forward_us=result.forward_us,
            sample_us=result.sample_us,
            device_us=result.device_us,
            prefill_tokens=len(batch.token_ids) - len(step.decodes),
            decode_tokens=len(step.decodes),
            running=facts.running,
            waiting=facts.waiting,
            kv_used=facts.kv_used,
            kv_total=facts.kv_total,
            prefix_hit_tokens=sum(r.cached_tokens for r in step.admitted if not r.preemptions),
            graph_bucket=-1,
            slots=seats.slot[rows],
            positions=positions,
            token_ids=token_ids,
            phases=phases,
            latency_us=latency_us,
            logprobs=result.logprobs,
            margins=result.margins,
            kv_blocks=seats.blocks[rows],
        )

    @_guarded
    def finish(self, handle: RequestHandle) -> None:
        """A request's end, once its answer has been passed on (or never will be)."""
        request = handle.request
        if handle.late_chunks:
            self._writer.event(
                kind="sent_late",
                request_id=request.request_id,
                slot=request.slot,
                detail=f"position={handle.most_late_position} chunks={handle.late_chunks}",
                duration_ns=handle.most_late_ns,
            )
        self._writer.finish(
            slot=request.slot,
            reason=handle.end_reason,
            output_tokens=request.output_len,
            admitted_ns=request.admitted_ns,
            first_token_ns=request.first_token_ns,
            last_token_ns=request.last_token_ns,
            detokenized_ns=request.detokenized_ns,
            serialized_ns=handle.serialized_ns,
            flushed_ns=handle.flushed_ns,
        )

    @_guarded
    def event(self, kind: str, detail: str, request: Request | None = None) -> None:
        """`kind`: one that `capture.schema.EVENTS` lists."""
        self._writer.event(
            kind=kind,
            request_id=None if request is None else request.request_id,
            slot=None if request is None or request.slot < 0 else request.slot,
            detail=detail,
        )

    @_guarded
    def _gc_pause(self, pause: Pause) -> None:
        """The frame's time is that of this call; `late_us` says how long ago the pause ended."""
        late_us = (time.monotonic_ns() - pause.ended_ns) // 1000
        self._writer.event(
            kind="gc_pause",
            request_id=None,
            slot=None,
            detail=f"generation={pause.generation} collected={pause.collected} late_us={late_us}",
            duration_ns=pause.duration_ns,
        )
