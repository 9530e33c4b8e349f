"""The engine's thread: right tokens whatever happens, every request answered, nothing leaked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from capture.frames import TraceWriter
from engine.admission import QueueLimits
from engine.core import Engine
from engine.errors import (
    EngineUnavailable,
    QueueFull,
    RequestAborted,
    RequestError,
    RequestFailed,
    RequestTooLong,
)
from engine.handle import RequestHandle
from engine.metrics import EngineMetrics
from engine.priorities import ClassAdjustment, Policy, write_policy
from engine.request import Request, SamplingParams
from engine.step import Limits
from engine.tracer import TOKEN_NONE, StepTracer
from tests.engine.fake_runner import EOS, ByteTokenizer, FakeRunner, expected
from tests.engine.recorder import RecordingWriter
from tests.waiting import PATIENCE_S, until

Start = Callable[..., Engine]


@pytest.fixture
def writer() -> RecordingWriter:
    return RecordingWriter()


@pytest.fixture
def start(writer: RecordingWriter) -> Iterator[Start]:
    """Starts engines on fake runners, and checks at the end that no block was lost."""
    engines: list[Engine] = []
    runners: list[FakeRunner] = []

    def build(runner: FakeRunner | None = None, **options: Any) -> Engine:
        runners.append(runner or FakeRunner())
        engine = Engine(
            runners[-1],
            ByteTokenizer(),
            limits=options.pop("limits", Limits(max_running=8, token_budget=64)),
            queue_limits=options.pop("queue_limits", QueueLimits(100, 10_000)),
            metrics=EngineMetrics("fake"),
            tracer=StepTracer(cast(TraceWriter, writer)),
            **options,
        )
        engines.append(engine)
        engine.start()
        return engine

    yield build
    for runner in runners:
        runner.release()
    for engine in engines:
        engine.stop(drain=False)
        if engine.failure is None:
            assert engine.scheduler.check() is None
            assert engine.pool.used == 0


def make(prompt: str | list[int], max_tokens: int = 8, **options: Any) -> Request:
    tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
    params = {k: options.pop(k) for k in list(options) if k in SamplingParams.__slots__}
    params.setdefault("temperature", 0.0)
    return Request(bytes(16), tokens, SamplingParams(max_tokens, **params), **options)


def test_tokens_text_and_reason(start: Start) -> None:
    handle = start().submit(make("hello world", 5))
    events = list(handle)
    assert [e.token_id for e in events] == expected(list(b"hello world"), 5)
    assert "".join(e.text for e in events) == ByteTokenizer().decode([e.token_id for e in events])
    assert [e.finish_reason for e in events] == [None] * 4 + ["length"]


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_cold_warm_and_after_abort_give_the_same_tokens(start: Start, length: int) -> None:
    engine = start()
    prompt = list(range(1, length + 1))
    want = expected(prompt, 6)
    for round_ in range(3):
        handle = engine.submit(make(prompt, 6))
        assert [e.token_id for e in handle] == want
        assert handle.request.cached_tokens == (0 if round_ == 0 else (length - 1) // 16 * 16)
        aborted = engine.submit(make(prompt, 100))
        next(iter(aborted))
        aborted.abort()
        until(lambda aborted=aborted: aborted.ended, "the request has ended")


def test_many_requests_on_too_little_memory_are_preempted_and_still_right(
    start: Start, writer: RecordingWriter
) -> None:
    limits = Limits(max_running=3, token_budget=64)
    engine = start(FakeRunner(num_blocks=12, block_size=4), limits=limits)
    requests = [make([i + 1] * (3 + i % 9), 24, priority=i % 3) for i in range(30)]
    handles = [engine.submit(request) for request in requests]
    for request, handle in zip(requests, handles, strict=True):
        got = [e.token_id for e in handle]
        assert got == expected(request.tokens[: request.prompt_len], 24)
    assert writer.events("preempted")
    assert len(writer.events("resumed")) == len(writer.events("preempted"))


def test_seeded_sampling_does_not_depend_on_company(start: Start) -> None:
    engine = start()
    alone = [e.token_id for e in engine.submit(make("prompt", 10, temperature=1.0, seed=7))]
    assert alone == expected(list(b"prompt"), 10, temperature=1.0, seed=7)
    handles = [
        engine.submit(make("prompt", 10, temperature=1.0, seed=seed)) for seed in (1, 7, 9, 7)
    ]
    answers = [[e.token_id for e in handle] for handle in handles]
    assert answers[1] == answers[3] == alone
    assert answers[0] != alone


def test_end_of_text_token_ends_the_answer_unless_ignored(start: Start) -> None:
    runner = FakeRunner()
    engine = start(runner)
    runner.script = [ord("a"), EOS]
    handle = engine.submit(make("x", 9))
    assert [e.finish_reason for e in handle] == [None, "stop"]
    assert (handle.output.text, handle.output.stop_reason) == ("a", None)
    runner.script = [ord("a"), EOS, ord("b")]
    handle = engine.submit(make("x", 3, ignore_eos=True))
    list(handle)
    assert (handle.output.text, handle.output.finish_reason) == ("ab", "length")


def test_stop_string_and_stop_token_are_not_part_of_the_text(start: Start) -> None:
    runner = FakeRunner()
    engine = start(runner)
    runner.script = list(b"one END two")
    handle = engine.submit(make("x", 11, stop=("END",)))
    list(handle)
    assert (handle.output.text, handle.output.stop_reason) == ("one ", "END")
    runner.script = list(b"one!")
    handle = engine.submit(make("x", 9, stop_token_ids=(ord("!"),)))
    list(handle)
    assert (handle.output.text, handle.output.stop_reason) == ("one", ord("!"))


def test_text_held_back_is_released_at_the_end(start: Start) -> None:
    runner = FakeRunner()
    engine = start(runner)
    runner.script = [*b"ab", 0xF0, 0x9F]
    handle = engine.submit(make("x", 4, stop=("abc",)))
    assert "".join(e.text for e in handle) == "ab�"


def test_prompt_logprobs_cover_every_token_but_the_first_across_chunks(start: Start) -> None:
    engine = start(limits=Limits(max_running=2, token_budget=7))
    prompt = list(range(1, 31))
    list(engine.submit(make(prompt, 1)))
    handle = engine.submit(make(prompt, 1, prompt_logprobs=2))
    list(handle)
    assert [position[0].token_id for position in handle.output.prompt] == prompt[1:]
    assert all(len(position) == 3 for position in handle.output.prompt)


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (lambda: make([]), RequestError, "empty"),
        (lambda: make([5, 260]), RequestError, "260"),
        (lambda: make([-1]), RequestError, "-1"),
        (lambda: make([1] * 600), RequestTooLong, "context holds 512"),
        (lambda: make([1] * 10, 510), RequestTooLong, "520 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    start: Start, request_: Callable[[], Request], error: type[RequestError], text: str
) -> None:
    with pytest.raises(error, match=text):
        start().submit(request_())


def test_request_larger_than_the_kv_cache_is_refused_and_others_go_on(start: Start) -> None:
    engine = start(FakeRunner(num_blocks=4, block_size=4))
    with pytest.raises(RequestTooLong, match="KV cache holds 16"):
        engine.submit(make([1] * 10, 7))
    assert len(list(engine.submit(make([1] * 10, 6)))) == 6


def test_abort_frees_the_blocks_before_the_next_step(start: Start, writer: RecordingWriter) -> None:
    runner = FakeRunner()
    runner.hold(after=3)
    engine = start(runner)
    handle = engine.submit(make("abort me please", 400))
    iterator = iter(handle)
    next(iterator)
    steps = runner.until_held()
    handle.abort()
    handle.abort()
    runner.release()
    with pytest.raises(RequestAborted):
        list(iterator)
    assert len(runner.steps) == steps
    assert engine.pool.used == 0
    handle.close()
    until(lambda: writer.of("finish"), "the finish frame")
    assert writer.of("finish")[0]["reason"] == "abort"
    assert len(writer.events("aborted")) == 1


def test_engine_that_fails_twice_over_still_answers_everybody(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner()
    runner.hold(after=1)
    engine = start(runner)
    first = engine.submit(make("first", 400))
    next(iter(first))
    late: list[RequestHandle] = []

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    def fail_late(*_: object) -> None:
        first.abort()
        late.append(engine.submit(make("late")))
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.scheduler, "end", fail)
    monkeypatch.setattr(engine.scheduler, "schedule", fail_late)
    runner.release()
    until(lambda: late, "the engine fails")
    for handle in (first, *late):
        with pytest.raises(EngineUnavailable, match="planted"):
            list(handle)
    until(lambda: not engine.alive, "the engine ends")


def test_failed_step_fails_its_requests_only(start: Start) -> None:
    runner = FakeRunner()
    runner.hold(after=3)
    engine = start(runner, limits=Limits(max_running=1, token_budget=64))
    first = engine.submit(make("first", 50))
    second = engine.submit(make("second", 5))
    next(iter(first))
    runner.until_held()
    runner.fail_next = 1
    runner.release()
    with pytest.raises(RequestFailed, match="planted failure"):
        list(first)
    assert [e.token_id for e in second] == expected(list(b"second"), 5)
    assert engine.alive


def test_device_that_keeps_failing_stops_the_engine_and_nobody_hangs(start: Start) -> None:
    runner = FakeRunner()
    runner.fail_next = 100
    engine = start(runner, limits=Limits(max_running=1, token_budget=64))
    handles = []
    errors = []
    for i in range(6):
        try:
            handles.append(engine.submit(make(f"request {i}", 5)))
        except EngineUnavailable as error:
            errors.append(error)
    for handle in handles:
        with pytest.raises(RequestError) as caught:
            list(handle)
        errors.append(caught.value)
    assert len(errors) == 6
    until(lambda: not engine.alive, "the engine ends")
    assert "planted failure" in str(engine.failure)
    with pytest.raises(EngineUnavailable, match="planted failure"):
        engine.submit(make("more"))


def test_fault_of_the_engine_itself_answers_everybody(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()

    def broken(_: int) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    with pytest.raises(RequestError):
        list(engine.submit(make("x")))
    until(lambda: not engine.alive, "the engine ends")


def test_damaged_result_fails_the_request_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner()
    engine = start(runner)
    real = runner.run

    def damaged(batch: Any) -> Any:
        result = real(batch)
        result.logprobs[0] = np.nan
        return result

    monkeypatch.setattr(runner, "run", damaged)
    with pytest.raises(RequestFailed, match="damaged"):
        list(engine.submit(make("x")))
    monkeypatch.setattr(runner, "run", real)
    assert len(list(engine.submit(make("x")))) == 8


def test_queue_bounds_on_requests_and_on_prompt_tokens(
    start: Start, writer: RecordingWriter
) -> None:
    runner = FakeRunner()
    runner.hold(after=1)
    limits = Limits(max_running=1, token_budget=64)
    engine = start(runner, limits=limits, queue_limits=QueueLimits(2, 40))
    running = engine.submit(make("runs", 400))
    next(iter(running))
    engine.submit(make([1] * 30, 5))
    with pytest.raises(QueueFull, match="the limit is 40"):
        engine.submit(make([1] * 11, 5))
    engine.submit(make([1] * 10, 5))
    with pytest.raises(QueueFull, match="the limit is 2") as caught:
        engine.submit(make("x"))
    assert 1 <= caught.value.retry_after_s <= 60
    runner.release()
    until(lambda: len(writer.events("rejected")) == 2, "both refusals are traced")


def test_stop_drains_what_runs_and_refuses_what_comes(start: Start) -> None:
    runner = FakeRunner()
    runner.hold(after=3)
    engine = start(runner)
    handle = engine.submit(make("drain", 30))
    runner.until_held()
    waiter = threading.Thread(target=engine.stop)
    waiter.start()
    until(lambda: engine.draining, "the stop has begun")
    with pytest.raises(EngineUnavailable, match="shutting down"):
        engine.submit(make("late"))
    runner.release()
    assert len(list(handle)) == 30
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_stop_past_its_deadline_answers_the_rest(start: Start) -> None:
    engine = start(FakeRunner(delay_s=0.05))
    handle = engine.submit(make("slow", 400))
    engine.stop(timeout_s=0.05)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        list(handle)


def test_many_asyncio_readers_get_their_own_tokens(start: Start) -> None:
    engine = start()

    async def ask(i: int) -> list[int]:
        handle = engine.submit(make(f"request {i}", 12))
        return [event.token_id async for event in handle]

    async def everybody() -> list[list[int]]:
        return await asyncio.gather(*(ask(i) for i in range(40)))

    answers = asyncio.run(everybody())
    assert answers == [expected(list(f"request {i}".encode()), 12) for i in range(40)]


def test_trace_accounts_for_every_token(start: Start, writer: RecordingWriter) -> None:
    engine = start(limits=Limits(max_running=4, token_budget=16))
    handles = [engine.submit(make([i] * length, 6)) for i, length in enumerate((5, 40, 100))]
    for handle in handles:
        list(handle)
        handle.close(serialized_ns=1, flushed_ns=2)
    until(lambda: len(writer.of("finish")) == 3, "three finish frames")
    assert [call["prompt_tokens"] for call in writer.of("request")] == [5, 40, 100]
    for finish in writer.of("finish"):
        assert finish["reason"] == "length"
        assert finish["output_tokens"] == 6
        times = [finish[f"{name}_ns"] for name in ("admitted", "first_token", "last_token")]
        assert 0 < times[0] <= times[1] <= times[2] <= finish["detokenized_ns"]
        assert (finish["serialized_ns"], finish["flushed_ns"]) == (1, 2)
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for step in writer.of("step"):
        assert len({len(step[c]) for c in ("slots", "positions", "phases", "kv_blocks")}) == 1
        assert 0 < step["kv_used"] <= step["kv_total"]
        for i, slot in enumerate(step["slots"].tolist()):
            row = (int(step["phases"][i]), int(step["positions"][i]), int(step["token_ids"][i]))
            rows.setdefault(slot, []).append(row)
    for handle in handles:
        mine = rows[handle.request.slot]
        tokens = [(p, t) for phase, p, t in mine if phase != 2]
        assert tokens == list(enumerate(handle.request.output))
        assert [phase for phase, p, _ in mine if p == 0 and phase != 2] == [1]
        assert all(t == TOKEN_NONE for phase, _, t in mine if phase == 2)
    scheduled = sum(s["prefill_tokens"] + s["decode_tokens"] for s in writer.of("step"))
    assert scheduled == 5 + 40 + 100 + 3 * 5


def test_request_that_ends_while_it_waits_is_in_the_trace(
    start: Start, writer: RecordingWriter
) -> None:
    runner = FakeRunner()
    runner.hold(after=1)
    engine = start(runner, limits=Limits(max_running=1, token_budget=64))
    next(iter(engine.submit(make("runs", 400))))
    waiting = engine.submit(make("waits", 5))
    waiting.close()
    runner.release()
    until(lambda: writer.of("finish"), "the finish frame")
    assert [call["slot"] for call in writer.of("request")] == [0, 1]
    assert writer.of("finish")[0]["first_token_ns"] == 0


def test_broken_trace_does_not_stop_the_engine(
    start: Start, writer: RecordingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "step", full, raising=False)
    engine = start()
    assert len(list(engine.submit(make("x")))) == 8
    assert engine._tracer is not None
    assert "No space left" in str(engine._tracer.failure)


def policy(adjustment: int, **changes: Any) -> Policy:
    now = datetime.now(UTC)
    return Policy(
        policy_id=changes.pop("policy_id", "p1"),
        created_at=now,
        expires_at=now + timedelta(hours=1),
        direction="demote_harmed",
        enabled=True,
        dry_run=False,
        max_effect=50,
        old_build="old",
        new_build="new",
        classes={"bad": ClassAdjustment(adjustment, 30, 0.4, 0.45, "expert")},
    )


def test_policy_reload_changes_the_order_of_service_and_says_so(
    start: Start, writer: RecordingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.following.POLL_S", 0.0)
    path, runner = tmp_path / "policy.json", FakeRunner()
    runner.hold(after=1)
    engine = start(runner, limits=Limits(1, 64), policy_path=path)
    blocker = engine.submit(make("blocks", 60, priority=100))
    next(iter(blocker))
    bad = engine.submit(make("bad one", 3, class_key="bad/chat/-"))
    good = engine.submit(make("good one", 3, class_key="good/chat/-"))
    runner.until_held()
    write_policy(path, policy(-30))
    runner.release()
    list(bad)
    list(good)
    assert good.request.admitted_ns < bad.request.admitted_ns
    assert (bad.request.effective, good.request.effective) == (20, 50)
    detail = writer.events("policy_reloaded")[0]["detail"]
    assert "p1" in detail
    assert "1 present requests changed" in detail


def test_policy_is_followed_while_idle_and_a_broken_file_means_neutral(
    start: Start, writer: RecordingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.following.POLL_S", 0.01)
    path = tmp_path / "policy.json"
    engine = start(policy_path=path)
    write_policy(path, policy(-30))
    until(lambda: writer.events("policy_reloaded"), "the policy is followed")
    handle = engine.submit(make("x", class_key="bad/chat/-"))
    list(handle)
    assert handle.request.effective == 20
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    broken.rename(path)
    until(lambda: len(writer.events("policy_reloaded")) == 2, "the broken policy is noticed")
    handle = engine.submit(make("x", class_key="bad/chat/-"))
    list(handle)
    assert handle.request.effective == 50
    assert "not JSON" in writer.events("policy_reloaded")[1]["detail"]
