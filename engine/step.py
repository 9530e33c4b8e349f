"""What one step of the engine is: its rows, and what the scheduler decided for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.request import Request

MAX_RUNNING = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_running` requests have a seat; a step computes at most `token_budget` tokens."""

    max_running: int
    token_budget: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= MAX_RUNNING:
            raise EngineError(
                f"{self.max_running} requests in the batch: the limits are 1 and {MAX_RUNNING}"
            )
        if self.token_budget <= self.max_running:
            raise EngineError(
                f"a token budget of {self.token_budget} leaves no room for prompts beside "
                f"{self.max_running} running requests: raise it above that, or run fewer"
            )


@dataclass(slots=True)
class Chunk:
    """`length` tokens of a request's prefill from position `start`; `last` draws a token."""

    request: Request
    start: int
    length: int
    last: bool


@dataclass(slots=True)
class Step:
    """Decode rows come before prefill rows. `grown` requests were given blocks; `preempted` ones
    have a reason; `aged` ones of the admitted went before better ones, for they had waited long;
    `stuck` ones were given up because no memory is left for them; `evicted` counts idle cached
    blocks that were reused."""

    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    aged: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    preempted: list[tuple[Request, str]] = field(default_factory=list)
    stuck: list[Request] = field(default_factory=list)
    evicted: int = 0

    @property
    def rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @property
    def requests(self) -> list[Request]:
        """The request of each row."""
        return self.decodes + [chunk.request for chunk in self.chunks]
