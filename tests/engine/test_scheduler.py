"""The scheduler, simulated without a model: what it promises to each request and to all."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.errors import EngineError, RequestTooLong
from engine.request import ENDED, IllegalTransition, Request, SamplingParams, State
from engine.scheduler import MAX_PREEMPTIONS, Scheduler
from engine.step import Limits, Step
from engine.waiting import AGING_NS, AGING_TURN

STEP_NS = 10_000_000


class Simulation:
    """Runs a scheduler against a clock of 10 ms a step; tokens count upwards."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 16,
        max_running: int = 4,
        token_budget: int = 64,
        max_model_len: int = 4096,
    ) -> None:
        pool = BlockPool(blocks, block_size)
        limits = Limits(max_running, token_budget)
        self.scheduler = Scheduler(pool, limits, max_model_len=max_model_len)
        self.now_ns = 0
        self.steps: list[Step] = []
        self.order: list[Request] = []
        self._slots = 0

    def add(
        self,
        prompt: int | list[int] = 5,
        max_tokens: int = 8,
        *,
        priority: int = 50,
        tenant: str = "t",
        class_key: str = "t/r/-",
    ) -> Request:
        tokens = [self._slots + 1000] * prompt if isinstance(prompt, int) else prompt
        request = Request(
            bytes(16),
            tokens,
            SamplingParams(max_tokens),
            tenant=tenant,
            class_key=class_key,
            priority=priority,
            arrival_ns=self.now_ns,
        )
        request.slot = self._slots
        self._slots += 1
        self.scheduler.add(request)
        return request

    def step(self) -> Step | None:
        self.now_ns += STEP_NS
        step = self.scheduler.schedule(self.now_ns)
        if step is None:
            return None
        self.steps.append(step)
        self.order += step.admitted
        if step.rows:
            self.scheduler.commit(step, [7] * step.rows)
        for request in [*self.scheduler.decoding.values()]:
            if request.output_len >= request.params.max_tokens:
                self.scheduler.end(request, State.FINISHED)
        assert self.scheduler.check() is None
        return step

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for count in range(limit):
            if self.step() is None:
                assert self.scheduler.idle
                return count
        raise AssertionError(f"not idle after {limit} steps")

    def until(self, condition: Callable[[], bool], limit: int = 10_000) -> int:
        for count in range(limit):
            if condition():
                return count
            self.step()
        raise AssertionError(f"did not happen within {limit} steps")


def finished(requests: Iterable[Request]) -> bool:
    return all(request.state is State.FINISHED for request in requests)


# -- what a step is made of


def test_long_prompt_never_stops_running_streams() -> None:
    sim = Simulation(blocks=300, token_budget=256)
    victim = sim.add(5, 200)
    sim.until(lambda: victim.state is State.DECODE)
    long = sim.add(4000, 4)
    while long.state is not State.DECODE:
        before = victim.output_len
        step = sim.step()
        assert step is not None
        assert victim.output_len == before + 1
        assert sum(chunk.length for chunk in step.chunks) + len(step.decodes) <= 256
    assert long.output_len == 1


def test_stream_of_arrivals_never_stops_a_running_request() -> None:
    sim = Simulation(blocks=300, max_running=4)
    running = sim.add(5, 40)
    sim.until(lambda: running.state is State.DECODE)
    for _ in range(30):
        sim.add(5, 5)
        before = running.output_len
        sim.step()
        assert running.output_len == before + 1


def test_short_prompt_overtakes_a_long_one_that_is_being_prefilled() -> None:
    sim = Simulation(blocks=300, token_budget=64)
    long = sim.add(2000, 4)
    sim.step()
    short = sim.add(20, 4)
    assert sim.until(lambda: short.output_len > 0) <= 2
    assert long.state is State.PREFILL


def test_long_prefill_progresses_under_a_flood_of_short_ones() -> None:
    sim = Simulation(blocks=400, token_budget=64, max_running=8)
    long = sim.add(800, 4)
    sim.step()
    for _ in range(100):
        sim.add(60, 2)
        sim.add(60, 2)
        sim.step()
    assert long.output_len > 0


@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 1000])
def test_prompt_is_computed_once_whatever_the_budget(chunk: int) -> None:
    sim = Simulation(token_budget=4 + chunk)
    request = sim.add(100, 3)
    sim.run()
    assert sum(chunk.length for step in sim.steps for chunk in step.chunks) == 100
    assert request.output_len == 3


# -- prefix sharing


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_prompt_that_is_all_cached_still_computes_its_last_token(length: int) -> None:
    sim = Simulation()
    prompt = list(range(length))
    for _ in range(2):
        request = sim.add(prompt, 2)
        sim.run()
    assert request.cached_tokens == (length - 1) // 16 * 16
    assert sum(c.length for c in sim.steps[-2].chunks) == length - request.cached_tokens


def test_blocks_of_a_prompt_still_being_computed_are_not_shared() -> None:
    sim = Simulation(token_budget=20)
    first = sim.add(list(range(64)), 2)
    second = sim.add(list(range(64)), 2)
    sim.step()
    assert first.computed < 64
    assert second.cached_tokens <= 0
    sim.run()


def test_recomputation_after_preemption_is_no_prefix_hit() -> None:
    sim = Simulation(blocks=8, block_size=4, max_running=2, token_budget=32)
    requests = [sim.add([i] * 8, 16) for i in range(2)]
    sim.run()
    assert any(request.preemptions for request in requests)
    assert all(request.cached_tokens == 0 for request in requests)


# -- order of service


def test_higher_priority_is_served_first_and_equals_by_arrival() -> None:
    sim = Simulation(max_running=1)
    sim.add(5, 50, priority=100)
    sim.step()
    requests = [sim.add(priority=p) for p in (10, 90, 50, 90, 0)]
    sim.run()
    assert [r.priority for r in sim.order[1:]] == [90, 90, 50, 10, 0]
    assert sim.order[1:3] == [requests[1], requests[3]]


def test_adjustment_changes_the_order_and_stays_within_bounds() -> None:
    sim = Simulation(max_running=1)
    sim.add(5, 50, priority=100)
    sim.step()
    bad = sim.add(class_key="bad/chat/-")
    good = sim.add(class_key="good/chat/-")
    assert sim.scheduler.reprioritise(lambda key: -70 if key.startswith("bad") else 0) == 1
    sim.run()
    assert sim.order[1:] == [good, bad]
    assert bad.effective == 0


def test_high_priority_takes_the_seat_of_a_low_one_at_once() -> None:
    sim = Simulation(max_running=2)
    low = [sim.add(5, 200, priority=10) for _ in range(2)]
    sim.until(lambda: all(r.state is State.DECODE for r in low))
    high = sim.add(5, 20, priority=90)
    sim.step()
    assert high.output_len == 1
    assert [r.state for r in low] == [State.DECODE, State.WAITING]
    sim.run()
    assert finished([*low, high])


def test_equal_priorities_never_displace_each_other() -> None:
    sim = Simulation(max_running=2)
    for _ in range(10):
        sim.add(5, 20)
    sim.run()
    assert not any(step.preempted for step in sim.steps)


def test_low_requests_progress_under_an_endless_stream_of_high_ones() -> None:
    sim = Simulation(max_running=2)
    low = [sim.add(5, 200, priority=0) for _ in range(2)]
    sim.until(lambda: all(r.state is State.DECODE for r in low))
    for _ in range(6000):
        if len(sim.scheduler.waiting) < 3:
            sim.add(5, 10, priority=90)
        sim.step()
        if finished(low):
            break
    assert finished(low), "starved"
    assert max(request.preemptions for request in low) <= MAX_PREEMPTIONS


def test_request_displaced_twice_is_left_alone() -> None:
    sim = Simulation(max_running=1)
    low = sim.add(5, 60, priority=10)
    for _ in range(5):
        sim.until(lambda: low.state is State.DECODE)
        high = sim.add(5, 3, priority=90)
        for _ in range(3):
            sim.step()
    assert low.preemptions == MAX_PREEMPTIONS
    assert low.state is State.DECODE
    assert high.state is State.WAITING


def test_large_request_gets_room_though_small_ones_keep_coming() -> None:
    sim = Simulation(blocks=16, block_size=4, max_running=8, token_budget=64)
    answers = cycle([3, 9, 5, 12, 7, 4])
    for _ in range(8):
        sim.add(4, next(answers), priority=50)
    sim.step()
    large = sim.add(40, 4, priority=0)
    sim.now_ns += AGING_NS
    for _ in range(60):
        while len(sim.scheduler.waiting) < 4:
            sim.add(4, next(answers), priority=50)
        sim.step()
    assert large.state is State.FINISHED


def test_high_priority_displaces_even_while_room_is_kept_for_an_aged_request() -> None:
    sim = Simulation(blocks=16, block_size=4, max_running=4, token_budget=64)
    low = [sim.add(4, 20, priority=10) for _ in range(4)]
    sim.until(lambda: all(r.state is State.DECODE for r in low))
    aged = sim.add(40, 4, priority=0)
    sim.now_ns += AGING_NS
    sim.step()
    assert aged.state is State.WAITING
    high = sim.add(4, 4, priority=90)
    sim.step()
    assert high.output_len == 1


def test_wait_is_bounded_by_the_number_of_older_requests() -> None:
    sim = Simulation(max_running=1)
    low = [sim.add(5, 4, priority=0) for _ in range(3)]
    admissions_after_aging = 0
    while any(r.admission < 0 for r in low):
        while len(sim.scheduler.waiting) < 8:
            sim.add(5, 4, priority=100)
        step = sim.step()
        assert step is not None
        if sim.now_ns >= AGING_NS:
            admissions_after_aging += len(step.admitted)
        assert admissions_after_aging <= AGING_TURN * (len(low) + 1)


def test_aging_does_not_change_priorities() -> None:
    sim = Simulation(blocks=200, max_running=1)
    sim.add(5, 3000, priority=100)
    old = sim.add(priority=10)
    for _ in range(AGING_NS // STEP_NS + 5):
        sim.step()
    assert old.effective == 10
    assert old.state is State.WAITING


def test_short_requests_find_a_seat_beside_long_ones() -> None:
    sim = Simulation(blocks=600, max_running=4)
    for _ in range(8):
        sim.add(5, 1000)
    sim.step()
    assert sim.scheduler.running == 3
    short = sim.add(5, 5)
    sim.step()
    assert short.output_len == 1


def test_long_requests_get_their_turn_beside_short_ones() -> None:
    sim = Simulation(blocks=200, max_running=1)
    long = sim.add(5, 300)
    for _ in range(40):
        sim.add(5, 3)
    sim.until(lambda: long.admission >= 0, limit=60)


def test_tenants_share_by_tokens_whatever_they_queue() -> None:
    sim = Simulation(blocks=200, max_running=2)
    for _ in range(200):
        sim.add(10, 10, tenant="greedy")
    for _ in range(20):
        sim.add(10, 10, tenant="modest")
    sim.until(lambda: len(sim.order) >= 40)
    first = Counter(request.tenant for request in sim.order[2:40])
    assert first["modest"] >= 17


@pytest.mark.parametrize(("prompt", "answer"), [(300, 10), (10, 150)])
def test_tenant_with_larger_requests_gets_fewer_of_them(prompt: int, answer: int) -> None:
    sim = Simulation(blocks=600, max_running=2, token_budget=128)
    for _ in range(100):
        sim.add(prompt, answer, tenant="large")
        sim.add(10, 10, tenant="small")
    sim.until(lambda: len(sim.order) >= 60)
    admitted = Counter(request.tenant for request in sim.order)
    assert admitted["small"] > 5 * admitted["large"]


def test_idle_tenant_earns_no_credit() -> None:
    sim = Simulation(blocks=200, max_running=1)
    for _ in range(30):
        sim.add(10, 10, tenant="busy")
    sim.until(lambda: len(sim.order) >= 20)
    for _ in range(10):
        sim.add(10, 10, tenant="new")
    seen = len(sim.order)
    sim.until(lambda: len(sim.order) >= seen + 10)
    assert Counter(r.tenant for r in sim.order[seen:])["busy"] >= 3


# -- memory


def test_out_of_blocks_preempts_the_least_important_and_newest() -> None:
    sim = Simulation(blocks=8, block_size=4, max_running=3, token_budget=32)
    old = sim.add(4, 20, priority=50)
    new = sim.add(4, 20, priority=50)
    high = sim.add(4, 20, priority=80)
    sim.run()
    preempted = [request for step in sim.steps for request, _ in step.preempted]
    assert preempted
    assert preempted[0] is new
    assert high not in preempted
    assert finished([old, new, high])


def test_preemptions_are_few_where_memory_is_short() -> None:
    sim = Simulation(blocks=24, block_size=4, max_running=6, token_budget=64)
    requests = [sim.add(6, 40) for _ in range(12)]
    sim.run()
    assert finished(requests)
    assert 0 < sum(r.preemptions for r in requests) < 18


def test_resumed_long_prefill_is_not_preempted_again_and_again() -> None:
    sim = Simulation(blocks=40, block_size=4, max_running=4, token_budget=12)
    requests = [sim.add(70, 8), *(sim.add(10, 40) for _ in range(6))]
    sim.run(limit=2000)
    assert finished(requests)


def test_request_that_can_never_fit_is_refused_and_others_run() -> None:
    sim = Simulation(blocks=4, block_size=4, max_model_len=1000)
    with pytest.raises(RequestTooLong, match="KV cache holds 16"):
        sim.add(20, 4)
    other = sim.add(8, 8)
    sim.run()
    assert finished([other])


def test_lost_blocks_fail_a_request_instead_of_hanging_it() -> None:
    sim = Simulation(blocks=4, block_size=4)
    lost = sim.scheduler.pool.allocate(2)
    assert lost is not None
    outgrows, never_starts = sim.add(6, 8), sim.add(10, 2)
    for _ in range(10):
        sim.now_ns += STEP_NS
        step = sim.scheduler.schedule(sim.now_ns)
        if step is not None and step.rows:
            sim.scheduler.commit(step, [7] * step.rows)
    assert (outgrows.state, never_starts.state) == (State.FAILED, State.FAILED)
    assert sim.scheduler.idle


def test_preempted_request_keeps_its_place() -> None:
    sim = Simulation(max_running=1)
    low = sim.add(5, 50, priority=10)
    sim.until(lambda: low.state is State.DECODE)
    later = sim.add(5, 5, priority=10)
    high = sim.add(5, 5, priority=90)
    sim.run()
    assert sim.order == [low, high, low, later]
    assert low.output_len == 50


def test_budget_without_room_for_prompts_is_refused() -> None:
    with pytest.raises(EngineError, match="token budget of 8"):
        Limits(max_running=8, token_budget=8)


# -- ends


def test_abort_in_flight_frees_after_the_step_and_once() -> None:
    sim = Simulation()
    request = sim.add(20, 8)
    step = sim.scheduler.schedule(1)
    assert step is not None
    sim.scheduler.end(request, State.ABORTED)
    sim.scheduler.end(request, State.ABORTED)
    assert sim.scheduler.pool.used == 2
    sim.scheduler.commit(step, [7])
    assert request.state is State.ABORTED
    assert sim.scheduler.pool.used == 0
    assert sim.scheduler.check() is None


def test_abort_of_the_step_that_would_finish_the_request_frees_once() -> None:
    sim = Simulation()
    request = sim.add(20, 1)
    step = sim.scheduler.schedule(1)
    assert step is not None
    sim.scheduler.end(request, State.ABORTED)
    sim.scheduler.commit(step, [7])
    sim.scheduler.end(request, State.FINISHED)
    assert request.state is State.ABORTED
    assert sim.scheduler.check() is None


def test_discarded_step_shares_nothing() -> None:
    sim = Simulation()
    request = sim.add(list(range(40)), 8)
    step = sim.scheduler.schedule(1)
    assert step is not None
    sim.scheduler.discard(step)
    assert request.state is State.FAILED
    assert sim.scheduler.pool.free == 64
    again = sim.add(list(range(40)), 2)
    sim.run()
    assert again.cached_tokens == 0


def test_states_that_are_not_connected_are_refused() -> None:
    request = Request(bytes(16), [1], SamplingParams(1))
    with pytest.raises(IllegalTransition, match="waiting to decode"):
        request.move(State.DECODE)


# -- everything at once


class Chaos:
    """Applies arbitrary operations to a scheduler, checking the pool after each."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.sim = Simulation(blocks=blocks, block_size=block_size, max_running=3, token_budget=16)
        self.blocks = blocks
        self.longest = blocks * block_size
        self.requests: list[Request] = []
        self.flying: Step | None = None

    def apply(self, operation: str, a: int, b: int) -> None:
        getattr(self, operation)(a, b)
        assert self.sim.scheduler.check() is None

    def add(self, a: int, b: int) -> None:
        prompt = 1 + a % (self.longest - 1)
        answer = 1 + b % min(20, self.longest - prompt)
        tokens = [(a >> (i % 7)) & 1 for i in range(prompt)]
        self.requests.append(self.sim.add(tokens, answer, priority=b % 3 * 50))

    def end(self, a: int, b: int) -> None:
        if self.requests:
            state = State.ABORTED if b % 2 else State.FAILED
            self.sim.scheduler.end(self.requests[a % len(self.requests)], state)

    def reprioritise(self, a: int, b: int) -> None:
        self.sim.scheduler.reprioritise(lambda _: a % 61 - 30)

    def step(self, a: int, b: int) -> None:
        """Start a step, or retire the one that was started."""
        scheduler = self.sim.scheduler
        if self.flying is None:
            self.sim.now_ns += AGING_NS if b % 5 == 0 else STEP_NS
            step = scheduler.schedule(self.sim.now_ns)
            self.flying = step if step is not None and step.rows else None
            return
        if b % 20 == 0:
            scheduler.discard(self.flying)
        else:
            scheduler.commit(self.flying, [a % 2] * self.flying.rows)
        self.flying = None
        for request in [*scheduler.decoding.values()]:
            if request.output_len >= request.params.max_tokens:
                scheduler.end(request, State.FINISHED)

    def finish(self) -> None:
        """Let everything end; all blocks must be back."""
        if self.flying is not None:
            self.step(0, 1)
        self.sim.run()
        assert all(request.state in ENDED for request in self.requests)
        pool = self.sim.scheduler.pool
        assert (pool.used, pool.free + pool.cached) == (0, self.blocks)


OPERATIONS = ["add", "end", "reprioritise", "step", "step", "step", "step"]
POOLS = [(6, 2), (24, 4), (40, 16)]


@given(
    st.sampled_from(POOLS),
    st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**16), st.integers(0, 2**16)),
        max_size=120,
    ),
)
@settings(max_examples=60, deadline=None)
def test_any_operations_conserve_blocks_and_end_every_request(
    pool: tuple[int, int], operations: list[tuple[str, int, int]]
) -> None:
    chaos = Chaos(*pool)
    for operation in operations:
        chaos.apply(*operation)
    chaos.finish()


@pytest.mark.parametrize("pool", POOLS)
def test_ten_thousand_random_operations_conserve_blocks(pool: tuple[int, int]) -> None:
    rng = random.Random(pool[0])
    chaos = Chaos(*pool)
    for _ in range(10_000):
        operation = rng.choice(OPERATIONS)
        if operation == "add" and len(chaos.sim.scheduler.waiting) > 20:
            operation = "step"
        chaos.apply(operation, rng.randrange(2**16), rng.randrange(2**16))
    chaos.finish()
    assert sum(r.state is State.FINISHED for r in chaos.requests) > 50


def test_step_stays_cheap_with_many_running_and_waiting() -> None:
    """Budget 100 us with 256 running and 10,000 waiting; the bound here is loose, for slow CI, and
    on the time that the step itself had a processor."""
    sim = Simulation(blocks=20_000, max_running=256, token_budget=1024)
    for i in range(10_256):
        sim.add(30, 200 + i % 50, tenant=f"t{i % 40}", priority=i % 3 * 25)
    for _ in range(60):
        sim.step()
    assert sim.scheduler.running > 180
    times = []
    for _ in range(100):
        began = time.thread_time()
        step = sim.scheduler.schedule(sim.now_ns)
        times.append(time.thread_time() - began)
        assert step is not None
        sim.scheduler.commit(step, [7] * step.rows)
    assert statistics.median(times) < 1e-3
