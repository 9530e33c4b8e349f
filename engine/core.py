"""The engine: a thread that schedules, runs and delivers, and the thread-safe door to it.

Everything that changes requests happens on the engine's thread, between steps; other threads leave
commands in its inbox. Not for HTTP: that is `engine.server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from engine.admission import Admission, QueueLimits, check_tokens
from engine.batch import Runner, StepBatch, StepResult
from engine.batching import build_batch
from engine.blocks import BlockPool
from engine.errors import (
    EngineUnavailable,
    RequestAborted,
    RequestError,
    RequestFailed,
    RunnerError,
)
from engine.following import PolicyFollower
from engine.handle import RequestHandle, notify
from engine.metrics import EngineMetrics
from engine.output import Output, TokenizerLike
from engine.request import Request, State
from engine.scheduler import Scheduler
from engine.seats import Seats
from engine.step import Limits, Step
from engine.tracer import StepFacts, StepTracer

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""After this many failed steps in a row the engine gives up: the device is broken."""


class Engine:
    """Serves requests on a runner. `failure` says why it has stopped for good, else None."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: TokenizerLike,
        *,
        limits: Limits,
        queue_limits: QueueLimits,
        metrics: EngineMetrics,
        tracer: StepTracer | None = None,
        policy_path: Path | None = None,
    ) -> None:
        self.metrics = metrics
        self.failure: str | None = None
        self.tokenizer = tokenizer
        self.pool = BlockPool(runner.num_blocks, runner.block_size)
        self.scheduler = Scheduler(self.pool, limits, max_model_len=runner.max_model_len)
        self._runner = runner
        self._tracer = tracer
        self._policy = PolicyFollower(policy_path)
        self._admission = Admission(queue_limits)
        self._seats = Seats(
            max_running=limits.max_running,
            max_blocks=self.pool.blocks_for(self.scheduler.capacity_tokens()),
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._accepting = False
        self._slots = 0
        self._handles: dict[int, RequestHandle] = {}
        self._unclosed: dict[int, RequestHandle] = {}
        self._touched: dict[int, RequestHandle] = {}
        self._new: list[Request] = []
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._stop_at: float | None = None
        self._step_id = 0
        self._step_started: float | None = None
        self._failed_steps = 0
        self._check_due = False
        self._reported: str | None = None
        metrics.bind(
            running=lambda: self.scheduler.running,
            waiting=lambda: len(self.scheduler.waiting),
            kv_usage=lambda: self.pool.used / self.pool.num_blocks,
            block_size=self.pool.block_size,
            num_blocks=self.pool.num_blocks,
        )

    # -- called from any thread -------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and takes requests."""
        return self._thread.is_alive() and self.failure is None

    @property
    def draining(self) -> bool:
        """Whether it finishes what it has and takes nothing new."""
        return self._stop_at is not None

    @property
    def trace_failure(self) -> str | None:
        """Why tracing has stopped; None while it works or when it was never on."""
        return None if self._tracer is None else self._tracer.failure

    @property
    def step_seconds(self) -> float:
        """How long the step now running has been running; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def start(self) -> None:
        """Start the engine's thread, once."""
        self._accepting = True
        if self._tracer is not None:
            self._tracer.watch_gc(self._inbox.put)
        self._thread.start()

    def begin_stop(self, *, timeout_s: float) -> None:
        """Take nothing new from now on, finish what is there for at most `timeout_s` seconds, fail
        the rest. Does not wait; of several calls the earliest end counts."""
        with self._lock:
            self._accepting = False
            self._stop_at = min(time.monotonic() + timeout_s, self._stop_at or math.inf)
        self._inbox.put(lambda: None)

    def stop(self, *, drain: bool = True, timeout_s: float = 30.0) -> None:
        """`begin_stop`, at once without `drain`, and wait for the thread's end."""
        self.begin_stop(timeout_s=timeout_s if drain else 0.0)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request and return its handle, bound to the running event loop if there is one.

        Raises `QueueFull`, `RequestTooLong`, `EngineUnavailable`, `RequestError` (unknown ids)."""
        try:
            check_tokens(request, self.tokenizer.vocab_size)
            self.scheduler.check_fits(request)
            return self._enqueue(request)
        except RequestError as error:
            request.slot = -1
            self.metrics.rejected(error.code or "invalid_request")
            if self._thread.is_alive():
                self._inbox.put(partial(self._event, "rejected", str(error), request))
            raise

    def _enqueue(self, request: Request) -> RequestHandle:
        loop = None
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
        with self._lock:
            if self.failure is not None:
                raise EngineUnavailable(f"the engine has failed: {self.failure}")
            if not self._accepting:
                raise EngineUnavailable("the engine is shutting down: try another")
            request.slot = self._slots
            self._admission.enter(request)
            self._slots += 1
            handle = RequestHandle(
                request,
                Output(request, self.tokenizer),
                loop=loop,
                abort=lambda handle: self._inbox.put(partial(self._abort, handle)),
                closed=lambda handle: self._inbox.put(partial(self._close, handle)),
            )
            self._inbox.put(partial(self._add, handle))
        return handle

    # -- the engine's thread ----------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            log.exception("the engine has failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._shut_down()

    def _turn(self) -> bool:
        """One round: commands, policy, one step. False when the engine is to end."""
        self._take_commands(wait=self.scheduler.idle)
        self._poll_policy()
        if self._stop_at is not None and (self.scheduler.idle or time.monotonic() >= self._stop_at):
            return False
        began_ns = time.monotonic_ns()
        step = self.scheduler.schedule(began_ns)
        if step is not None:
            self._check_due = True
            self._report_decisions(step, began_ns)
            self._report_waiting(began_ns)
            if step.rows:
                self._run(step, began_ns)
        elif self._check_due and self.scheduler.idle:
            self._check_invariants()
        notify(self._touched.values())
        self._touched.clear()
        return self.failure is None

    def _take_commands(self, *, wait: bool) -> None:
        busy = self._stop_at is not None or self._check_due
        timeout = 0.0 if busy else self._policy.wait_s()
        with contextlib.suppress(queue.Empty):
            if wait:
                self._inbox.get(timeout=timeout)()
            while True:
                self._inbox.get_nowait()()

    def _run(self, step: Step, began_ns: int) -> None:
        rows = self._seats.update(step)
        batch = build_batch(step, self._seats, rows, self.pool.block_size)
        scheduled_ns = time.monotonic_ns()
        facts = StepFacts(
            step_id=self._step_id,
            start_ns=began_ns,
            schedule_us=(scheduled_ns - began_ns) / 1000,
            running=self.scheduler.running,
            waiting=len(self.scheduler.waiting),
            kv_used=self.pool.used,
            kv_total=self.pool.num_blocks,
        )
        self._step_id += 1
        self._step_started = time.monotonic()
        try:
            result = self._runner.run(batch)
            if len(result.token_ids) != step.rows:
                raise RunnerError(f"{len(result.token_ids)} results for {step.rows} rows")
        except Exception as error:  # noqa: BLE001 - a step's fault is its requests' alone
            self._step_failed(step, error)
            return
        finally:
            self._step_started = None
        self._failed_steps = 0
        self._deliver(step, rows, batch, result, facts)

    def _deliver(
        self, step: Step, rows: np.ndarray, batch: StepBatch, result: StepResult, facts: StepFacts
    ) -> None:
        """Retire a step: trace, metrics, state, then each request's new token."""
        now_ns = time.monotonic_ns()
        seats = self._seats
        drawn = np.array([sampling is not None for sampling in batch.sampling])
        latency_us = ((now_ns - seats.last_ns[rows]) / 1000).astype(np.float32)
        if self._tracer is not None:
            self._tracer.step(step, seats, rows, batch, result, latency_us, facts)
        self.metrics.step(step, latency_us, drawn=drawn, gaps=drawn & seats.started[rows])
        seats.drew(rows[drawn], now_ns)
        tokens = result.token_ids.tolist()
        self.scheduler.commit(step, tokens)
        for row, chunk in enumerate(step.chunks, start=len(step.decodes)):
            prompt = result.prompt[row]
            if prompt is not None:
                self._handles[chunk.request.slot].output.add_prompt(chunk.start, prompt)
        logprobs, margins = result.logprobs.tolist(), result.margins.tolist()
        for row, request in enumerate(step.requests):
            if batch.sampling[row] is not None:
                self._token(request, tokens[row], logprobs[row], margins[row], result, row, now_ns)

    def _token(
        self,
        request: Request,
        token: int,
        logprob: float,
        margin: float,
        result: StepResult,
        row: int,
        now_ns: int,
    ) -> None:
        handle = self._handles[request.slot]
        if not 0 <= token < self.tokenizer.vocab_size or math.isnan(logprob):
            error = f"the device drew token {token} with log-probability {logprob}"
            self._end(handle, State.FAILED, RequestFailed(f"{error}: the model is damaged"))
            return
        if not request.first_token_ns:
            request.first_token_ns = now_ns
        request.last_token_ns = now_ns
        event = handle.output.add(token, logprob, margin, result.top[row], now_ns)
        request.detokenized_ns = time.monotonic_ns()
        handle.push(event)
        self._touched[request.slot] = handle
        if event.finish_reason is not None:
            self._end(handle, State.FINISHED, None)

    def _step_failed(self, step: Step, error: Exception) -> None:
        log.error("step %d failed", self._step_id - 1, exc_info=error)
        self._failed_steps += 1
        self.scheduler.discard(step)
        message = f"the step that computed this request failed: {error}"
        for request in step.requests:
            self._end(self._handles[request.slot], State.FAILED, RequestFailed(message))
        if self._failed_steps >= MAX_FAILED_STEPS:
            self.failure = f"{self._failed_steps} steps in a row failed, the last with: {error}"

    def _report_decisions(self, step: Step, now_ns: int) -> None:
        """Tell trace and metrics what the scheduler decided, and clients what it gave up."""
        for request in step.aged:
            waited_s = (now_ns - request.arrival_ns) / 1e9
            self._event("aged", f"went first for its age, {waited_s:.1f} s", request)
        for request in step.admitted:
            if request.admitted_ns:
                self._event("resumed", f"after {request.preemptions} preemptions", request)
                continue
            request.admitted_ns = now_ns
            self._admission.leave(request)
            self.metrics.admitted(request)
            if self._tracer is not None:
                self._tracer.request(request)
        for request, reason in step.preempted:
            self.metrics.preempted()
            self._event("preempted", reason, request)
        if step.evicted:
            self._event("cache_evicted", f"{step.evicted} idle blocks reused")
        for request in step.stuck:
            message = f"no KV block is left for {len(request.tokens)} tokens: shorten the request"
            self._end(self._handles[request.slot], State.FAILED, RequestFailed(message))

    def _report_waiting(self, now_ns: int) -> None:
        """Trace the new requests that found no seat at once: their own frame is written when they
        are admitted, and until then nobody could tell that they are there."""
        new, self._new = self._new, []
        if self._tracer is not None:
            for request in new:
                if request.state is State.WAITING and not request.admitted_ns:
                    running, waiting = self.scheduler.running, len(self.scheduler.waiting)
                    self._tracer.queued(request, now_ns, running=running, waiting=waiting)

    def _poll_policy(self) -> None:
        change = self._policy.poll()
        if change is None:
            return
        changed = self.scheduler.reprioritise(self._policy.adjustment)
        in_force = change.policy is not None and change.policy.in_force(datetime.now(UTC))
        self.metrics.policy(change.policy_id or "", in_force)
        self._event("policy_reloaded", f"{change.reason}; {changed} present requests changed")
        log.info("%s", change.reason)

    def _check_invariants(self) -> None:
        self._check_due = False
        problem = self.scheduler.check()
        if problem is not None and problem != self._reported:
            self._reported = problem
            log.error("the block pool is inconsistent: %s", problem)
            self._event("degraded", f"the block pool is inconsistent: {problem}")

    def _event(self, kind: str, detail: str, request: Request | None = None) -> None:
        if self._tracer is not None:
            self._tracer.event(kind, detail, request)

    def _add(self, handle: RequestHandle) -> None:
        request = handle.request
        request.adjust(self._policy.adjustment(request.class_key))
        self._handles[request.slot] = handle
        self.scheduler.add(request)
        self._new.append(request)

    def _abort(self, handle: RequestHandle) -> None:
        if not handle.ended:
            self._event("aborted", "by the client", handle.request)
            error = RequestAborted("the request was aborted before its answer was complete")
            self._end(handle, State.ABORTED, error)

    def _close(self, handle: RequestHandle) -> None:
        if self._unclosed.pop(handle.request.slot, None) is not None and self._tracer is not None:
            self._tracer.finish(handle)

    def _end(self, handle: RequestHandle, state: State, error: RequestError | None) -> None:
        """The one place where a request leaves the engine."""
        request = handle.request
        self.scheduler.end(request, state)
        self._handles.pop(request.slot, None)
        self._admission.leave(request)
        self._admission.ended()
        if self._tracer is not None and not request.admitted_ns:
            self._tracer.request(request)
        handle.end(error)
        self._unclosed[request.slot] = handle
        self._touched[request.slot] = handle
        self.metrics.ended(handle)

    def _shut_down(self) -> None:
        """Answer everybody who still waits."""
        with self._lock:
            self._accepting = False
        if self._tracer is not None:
            self._tracer.close()
        while not self._inbox.empty():
            try:
                self._take_commands(wait=False)
            except Exception:  # after a failure nothing is sure but that nobody may be left hanging
                log.exception("a command failed while the engine was ending")
        why = f"has failed: {self.failure}" if self.failure else "is shutting down: try another"
        for handle in list(self._handles.values()):
            error = EngineUnavailable(f"the engine {why}")
            if self.failure is None:
                self._end(handle, State.ABORTED, error)
            else:  # the scheduler's state is not to be relied on any more
                handle.end(error)
                self._touched[handle.request.slot] = handle
        for handle in list(self._unclosed.values()):
            self._close(handle)
        notify(self._touched.values())
