"""A request: all its state in one object, and the state machine it moves through.

Only `engine.scheduler.Scheduler` moves requests between states and touches their blocks. Not for
delivering the answer: that is `engine.handle`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from engine.errors import EngineError

SHORT_MAX_TOKENS = 256
"""A request that may generate at most this many tokens is of the short service class."""

MIN_PRIORITY, MAX_PRIORITY, DEFAULT_PRIORITY = 0, 100, 50


class State(Enum):
    """Where a request is. PREEMPTED is passed through on the way back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


ENDED = frozenset({State.FINISHED, State.FAILED, State.ABORTED})
RUNNING = frozenset({State.PREFILL, State.DECODE})

_NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.FAILED, State.ABORTED}),
    State.PREFILL: frozenset({State.DECODE, State.PREEMPTED}) | ENDED,
    State.DECODE: frozenset({State.PREEMPTED}) | ENDED,
    State.PREEMPTED: frozenset({State.WAITING}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.ABORTED: frozenset(),
}


class IllegalTransition(EngineError):
    """A request was to move between states that are not connected: a fault of the engine."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate, defaults filled in. `top_k` 0: no limit. `logprobs` and `prompt_logprobs`:
    None or the number of alternatives to report at each output or prompt position."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One request. `tokens` is prompt plus output; `computed` of them are in the KV cache.

    `record_top`: alternatives to record for each token beyond what the client asked to see. Times
    are `time.monotonic_ns()`; 0 means it never happened. `effective` is the priority after
    the policy's `adjustment`, larger is served first. `protected` requests are not preempted for
    a higher priority. `slot` is the engine's ordinal of the request, `row` its seat in the batch.
    The first `shared_blocks` blocks are shareable and make up the prefix `prefix_serial` (None:
    no further block can be shared).
    """

    request_id: bytes
    tokens: list[int]
    params: SamplingParams
    tenant: str = "default"
    route: str = "completions"
    class_key: str = "default/completions/-"
    priority: int = DEFAULT_PRIORITY
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    record_top: int = 0

    slot: int = -1
    state: State = State.WAITING
    prompt_len: int = 0
    adjustment: int = 0
    effective: int = 0

    computed: int = 0
    cached_tokens: int = -1
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    shared_blocks: int = 0
    prefix_serial: int | None = None
    capacity: int = 0
    row: int = -1
    admission: int = -1
    preemptions: int = 0
    protected: bool = False

    queued_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    detokenized_ns: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)
        self.prompt_len = len(self.tokens)
        self.adjust(0)

    @property
    def is_short(self) -> bool:
        return self.params.max_tokens <= SHORT_MAX_TOKENS

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def adjust(self, adjustment: int) -> None:
        """Set the policy's adjustment; the effective priority stays within 0..100."""
        self.adjustment = adjustment
        self.effective = max(MIN_PRIORITY, min(MAX_PRIORITY, self.priority + adjustment))

    def move(self, state: State) -> None:
        """Enter `state`. Raises `IllegalTransition` when there is no such transition."""
        if state not in _NEXT[self.state]:
            raise IllegalTransition(
                f"request {self.request_id.hex()} cannot go from {self.state.value} "
                f"to {state.value}"
            )
        self.state = state
