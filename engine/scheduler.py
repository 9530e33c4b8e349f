"""Decides what each step computes. Pure Python over plain data: no model, no device, no clock.

Every step first lets all decoding requests draw a token, then fills the rest of the token budget
with prefill chunks, so a long prompt never stops running streams. It is the one owner of request
states and of their blocks. Not for waiting order (`engine.waiting`) or delivery (`engine.core`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TypeVar

from engine.blocks import ROOT_SERIAL, BlockPool
from engine.errors import EngineError, RequestTooLong
from engine.request import ENDED, MAX_PRIORITY, Request, State
from engine.step import Chunk, Limits, Step
from engine.waiting import WaitingQueue

MAX_PREFILLING = 4
"""Prompts in prefill at a time, unless a more important one arrives or there is budget left."""

LONG_SHARE = 0.75
"""Share of the seats that long requests may hold, so that a short one finds a seat soon."""

MAX_PREEMPTIONS = 2
"""After this many preemptions a request is protected from preemption by priority."""

DECODE_WEIGHT = 2
"""What an output token costs a tenant, in prompt tokens (a decode step computes few at a time)."""


_Key = TypeVar("_Key", int, str)


class _Place(Enum):
    """Whether a waiting request could be admitted."""

    ADMITTED = auto()
    CLASS_FULL = auto()
    NO_ROOM = auto()


class Scheduler:
    """`schedule` plans a step, `commit` (or `discard`) retires it; between the two nothing is
    freed: requests ended meanwhile are ended when the step retires."""

    def __init__(self, pool: BlockPool, limits: Limits, *, max_model_len: int) -> None:
        self.pool = pool
        self.limits = limits
        self.max_model_len = max_model_len
        self.waiting = WaitingQueue()
        self.decoding: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        self._rows = list(range(limits.max_running - 1, -1, -1))
        self._decoding_of: Counter[str] = Counter()
        self._displaceable_at: Counter[int] = Counter()
        self._long_running = 0
        self._long_limit = max(1, int(limits.max_running * LONG_SHARE))
        self._admissions = 0
        self._in_flight = False
        self._deferred: list[tuple[Request, State]] = []

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def capacity_tokens(self) -> int:
        """The longest sequence (prompt and answer) that can ever be served, in tokens."""
        return min(self.max_model_len, self.pool.num_blocks * self.pool.block_size)

    def check_fits(self, request: Request) -> None:
        """Raises `RequestTooLong` when the request could never be served, even alone."""
        wanted = request.prompt_len + request.params.max_tokens
        if wanted <= self.capacity_tokens():
            return
        kind = "context" if wanted > self.max_model_len else "KV cache"
        raise RequestTooLong(
            f"{request.prompt_len} prompt tokens and max_tokens {request.params.max_tokens} make "
            f"{wanted} tokens, the {kind} holds {self.capacity_tokens()}: shorten the prompt or "
            f"lower max_tokens",
            param="max_tokens" if request.prompt_len < self.capacity_tokens() else "prompt",
        )

    def add(self, request: Request) -> None:
        """Let a new request wait. Raises `RequestTooLong` when it can never be served."""
        self.check_fits(request)
        self.waiting.enter(request)
        self.waiting.push(request)

    def end(self, request: Request, state: State) -> None:
        """Finish, fail or abort a request wherever it is, freeing its blocks exactly once; after
        the step in flight, if there is one. A request that has ended already stays as it is."""
        if self._in_flight:
            self._deferred.append((request, state))
        elif request.state not in ENDED:
            if request.state is State.WAITING:
                self.waiting.remove(request)
            else:
                self._unseat(request)
            request.move(state)
            self.waiting.leave(request)

    def reprioritise(self, adjustment_of: Callable[[str], int]) -> int:
        """Apply new adjustments by class key to all requests; returns how many changed."""
        everyone = [*self.waiting, *self.decoding.values(), *self.prefilling.values()]
        changed = 0
        for request in everyone:
            adjustment = adjustment_of(request.class_key)
            if adjustment != request.adjustment:
                request.adjust(adjustment)
                changed += 1
        if changed:
            self.waiting.rebuild()
            running = [*self.decoding.values(), *self.prefilling.values()]
            self._displaceable_at = Counter(r.effective for r in running if not r.protected)
        return changed

    def schedule(self, now_ns: int) -> Step | None:
        """Plan the next step at monotonic time `now_ns`; None when there is nothing to compute."""
        step = Step()
        evictions = self.pool.evictions
        self._grow(step)
        room = self.limits.token_budget - len(self.decoding)
        if self.waiting:
            self._admit(step, room, now_ns)
        step.decodes = list(self.decoding.values())
        if self.prefilling:
            self._fill(step, self.limits.token_budget - len(step.decodes))
        step.evicted = self.pool.evictions - evictions
        if step.rows:
            self._in_flight = True
            return step
        if self.waiting:  # even alone it finds no room: blocks must have been lost
            self._give_up(self.waiting.candidates(now_ns)[0][0], step)
        return step if step.stuck else None

    def commit(self, step: Step, token_ids: Sequence[int]) -> None:
        """Retire a computed step. `token_ids` has one entry a row (ignored where none is drawn);
        drawn tokens are appended and blocks that are now full become shareable."""
        size = self.pool.block_size
        for request, token in zip(step.decodes, token_ids, strict=False):
            request.computed += 1
            if request.computed % size == 0:
                self._share(request)
            request.tokens.append(token)
        for chunk, token in zip(step.chunks, token_ids[len(step.decodes) :], strict=True):
            request = chunk.request
            request.computed += chunk.length
            self._share(request)
            if chunk.last:
                request.tokens.append(token)
                self._start_decoding(request)
        self._charge(step)
        self._retire()

    def discard(self, step: Step, state: State = State.FAILED) -> None:
        """Retire a step that failed: its requests end in `state`, their blocks are not shared."""
        self._deferred.extend((request, state) for request in step.requests)
        self._retire()

    def check(self) -> str | None:
        """Verify the block pool against all running requests; None, or what is wrong."""
        running = [*self.decoding.values(), *self.prefilling.values()]
        return self.pool.check(request.block_table for request in running)

    def _retire(self) -> None:
        self._in_flight = False
        deferred, self._deferred = self._deferred, []
        for request, state in deferred:
            self.end(request, state)

    def _grow(self, step: Step) -> None:
        """Give every decoding request room for its next token, preempting where memory is out."""
        needy = [r for r in self.decoding.values() if len(r.tokens) > r.capacity]
        blocks = self.pool.allocate(len(needy))
        if blocks is not None:
            for request, block in zip(needy, blocks, strict=True):
                self._hold(request, [block])
            step.grown += needy
            return
        for request in needy:
            while request.state is State.DECODE:
                block = self.pool.allocate(1)
                if block is not None:
                    self._hold(request, block)
                    step.grown.append(request)
                    break
                if self.running == 1:
                    self._give_up(request, step)
                    break
                self._preempt(self._least_important(), step, "out of KV blocks")

    def _give_up(self, request: Request, step: Step) -> None:
        step.stuck.append(request)
        self.end(request, State.FAILED)

    def _least_important(self) -> Request:
        running = [*self.decoding.values(), *self.prefilling.values()]
        return min(running, key=lambda r: (r.protected, r.effective, -r.admission))

    def _admit(self, step: Step, room: int, now_ns: int) -> None:
        while self.waiting and self._admit_next(step, room, now_ns):
            pass

    def _admit_next(self, step: Step, room: int, now_ns: int) -> bool:
        """Admit the best waiting request. Nothing overtakes one that finds no room: what is freed
        next is its; except that one of higher priority may still displace a running request."""
        hold = False
        candidates = self.waiting.candidates(now_ns)
        for request, aged in candidates:
            if not self._may_prefill(request, room):
                return False
            place = self._place(request, step, aged=aged, hold=hold)
            if place is _Place.ADMITTED:
                if aged and candidates[1][0] is not request:  # it went before the best
                    step.aged.append(request)
                return True
            if place is _Place.NO_ROOM and not aged:
                return False
            hold = hold or place is _Place.NO_ROOM
        return False

    def _may_prefill(self, request: Request, room: int) -> bool:
        if len(self.prefilling) < MAX_PREFILLING:
            return True
        ahead = sum(
            r.remaining for r in self.prefilling.values() if r.effective >= request.effective
        )
        return ahead < room

    def _place(self, request: Request, step: Step, *, aged: bool, hold: bool) -> _Place:
        """Give the request a seat and blocks, or the blocks and seats of less important running
        requests. `hold`: free room is kept for another request."""
        lowest = min(self._displaceable_at, default=MAX_PRIORITY)
        outranks = lowest < request.effective
        if not outranks and (hold or not self._rows):
            return _Place.NO_ROOM
        hits, needed = self._demand(request)
        class_full = not request.is_short and not aged and self._long_running >= self._long_limit
        available = 0 if hold else self.pool.available - self.pool.idle(hits)
        headroom = self._headroom(request)
        if class_full or not self._rows or needed + headroom > available:
            victims = []
            if outranks:
                victims = self._victims(request, needed - available, hits, class_full=class_full)
            for victim in victims:
                self._preempt(victim, step, f"for priority {request.effective}")
            hits, needed = self._demand(request)
            if not victims or needed > self.pool.available - self.pool.idle(hits):
                return _Place.CLASS_FULL if class_full else _Place.NO_ROOM
        self._seat(request, hits, needed, aged=aged)
        step.admitted.append(request)
        step.grown.append(request)
        return _Place.ADMITTED

    def _demand(self, request: Request) -> tuple[list[int], int]:
        """Cached blocks the request can share, and how many more it needs for its known tokens.
        At least the last known token is always computed: its logits give the next one."""
        total = self.pool.blocks_for(len(request.tokens))
        if request.params.prompt_logprobs is not None:
            return [], total
        limit = (len(request.tokens) - 1) // self.pool.block_size
        self.pool.extend_hashes(request.block_hashes, request.tokens, limit)
        hits = self.pool.match(request.block_hashes, request.tokens, limit)
        return hits, total - len(hits)

    def _headroom(self, request: Request) -> int:
        """Blocks to leave for the running requests' growth; more for a request that has been
        preempted before, so that it does not come back only to be preempted again."""
        if not self.running:
            return 0
        return min(self.running + (1 << request.preemptions) - 1, self.pool.num_blocks // 8)

    def _victims(
        self, request: Request, missing: int, hits: list[int], *, class_full: bool
    ) -> list[Request]:
        """Running requests to preempt so that `request` finds room: only those of strictly lower
        priority, least important first, and none unless they suffice."""
        running = [*self.decoding.values(), *self.prefilling.values()]
        lower = [r for r in running if r.effective < request.effective and not r.protected]
        if class_full:
            lower = [r for r in lower if not r.is_short]
        lower.sort(key=lambda r: (r.effective, -r.admission))
        kept = set(hits)
        victims: list[Request] = []
        for victim in lower:
            victims.append(victim)
            missing -= self.pool.sole(block for block in victim.block_table if block not in kept)
            if missing <= 0:
                return victims
        return []

    def _seat(self, request: Request, hits: list[int], needed: int, *, aged: bool) -> None:
        self.waiting.admitted(request, aged=aged)
        self.pool.share(hits)
        fresh = self.pool.allocate(needed)
        if fresh is None:
            raise EngineError(f"{needed} blocks were promised, {self.pool.available} are left")
        self._hold(request, hits + fresh)
        request.computed = len(hits) * self.pool.block_size
        request.shared_blocks = len(hits)
        request.prefix_serial = self.pool.serial(hits[-1]) if hits else ROOT_SERIAL
        if request.cached_tokens < 0:
            request.cached_tokens = request.computed
        request.row = self._rows.pop()
        request.admission = self._admissions
        request.protected = request.protected or aged
        self._admissions += 1
        self._long_running += not request.is_short
        if not request.protected:
            self._displaceable_at[request.effective] += 1
        self.prefilling[request.slot] = request
        request.move(State.PREFILL)

    def _hold(self, request: Request, blocks: list[int]) -> None:
        request.block_table.extend(blocks)
        request.capacity = len(request.block_table) * self.pool.block_size

    def _unseat(self, request: Request) -> None:
        """Take a running request's seat and blocks."""
        if self.decoding.pop(request.slot, None) is None:
            del self.prefilling[request.slot]
        else:
            _count_down(self._decoding_of, request.tenant)
        if not request.protected:
            _count_down(self._displaceable_at, request.effective)
        self.pool.release(request.block_table)
        request.block_table.clear()
        request.capacity = request.computed = 0
        self._rows.append(request.row)
        request.row = -1
        self._long_running -= not request.is_short

    def _preempt(self, request: Request, step: Step, reason: str) -> None:
        """Send a running request back to wait; what it has generated is kept and recomputed."""
        self._unseat(request)
        request.move(State.PREEMPTED)
        request.preemptions += 1
        request.protected = request.protected or request.preemptions >= MAX_PREEMPTIONS
        request.move(State.WAITING)
        self.waiting.push(request)
        step.preempted.append((request, reason))

    def _fill(self, step: Step, room: int) -> None:
        """Share `room` tokens among the prefilling requests: by priority, then the shortest
        remainder; but the one admitted first always gets a quarter, so none is starved."""
        queue = list(self.prefilling.values())
        senior = queue[0]
        if len(queue) > 1:
            queue.sort(key=lambda r: (-r.effective, r.remaining))
        reserved = min(senior.remaining, max(1, room // 4))
        for request in queue:
            if request is senior:
                reserved = 0
            length = min(request.remaining, room - reserved)
            if length <= 0:
                continue
            last = length == request.remaining
            step.chunks.append(Chunk(request, request.computed, length, last))
            room -= length

    def _share(self, request: Request) -> None:
        """Make the request's blocks that are now full and computed shareable."""
        size = self.pool.block_size
        full = request.computed // size
        self.pool.extend_hashes(request.block_hashes, request.tokens, full)
        while request.shared_blocks < full and request.prefix_serial is not None:
            i = request.shared_blocks
            request.prefix_serial = self.pool.register(
                request.block_table[i],
                request.block_hashes[i],
                request.tokens[i * size : (i + 1) * size],
                request.prefix_serial,
            )
            request.shared_blocks += 1

    def _start_decoding(self, request: Request) -> None:
        del self.prefilling[request.slot]
        self.decoding[request.slot] = request
        self._decoding_of[request.tenant] += 1
        request.move(State.DECODE)

    def _charge(self, step: Step) -> None:
        """Charge the tenants what this step computed for them."""
        tenants = self.waiting.tenants
        for chunk in step.chunks:
            tenants[chunk.request.tenant].served += chunk.length
        for name, count in self._decoding_of.items():
            tenants[name].served += DECODE_WEIGHT * count


def _count_down(counter: Counter[_Key], key: _Key) -> None:
    """Take one off `key` and drop it at zero: the counter's keys are what is present."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
