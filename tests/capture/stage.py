"""An engine played by a script: what it says about a run is consistent to the microsecond.

The clock moves by what a step is said to take, latencies follow from it, and frames are committed
at its time (the ring's module gets the clock in place of `time`). A test changes one thing.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import numpy as np

from capture.frames import NONE, TraceWriter

US, MS = 1_000, 1_000_000
DECODE_US = 2700.0
TIMES = ("admitted", "first_token", "last_token", "detokenized", "serialized", "flushed")
NEVER = {f"{name}_ns": 0 for name in TIMES}


class Clock:
    """Stands in for the ring's time module, so that frames are written when the scenario says."""

    def __init__(self) -> None:
        self.ns = time.monotonic_ns()

    def monotonic_ns(self) -> int:
        return self.ns

    def time_ns(self) -> int:
        return time.time_ns()


@dataclass
class Player:
    """A request on the stage."""

    slot: int
    request_id: UUID
    arrival_ns: int
    fields: dict[str, Any]
    computed: int
    admitted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    tokens: int = 0


@dataclass
class Stage:
    """`arrive`, then `step` for each step with who is in it, then `finish`."""

    trace: TraceWriter
    clock: Clock
    players: dict[int, Player] = field(default_factory=dict)
    next_step: int = 0

    def arrive(self, slot: int, *, request_id: UUID | None = None, **changed: Any) -> Player:
        """A request reaches the server; the engine has not seen it yet."""
        fields = {
            "prompt_tokens": 12,
            "cached_tokens": 0,
            "max_tokens": 400,
            "priority": 50,
            "adjustment": 0,
            "tenant": "acme",
            "route": "chat",
            "class_key": "acme/chat/-",
            **changed,
        }
        player = Player(slot, request_id or uuid4(), self.clock.ns, fields, fields["cached_tokens"])
        self.players[slot] = player
        return player

    def step(
        self,
        decodes: tuple[int, ...] = (),
        prompts: dict[int, int] | None = None,
        *,
        forward_us: float | None = None,
        schedule_us: float = 50.0,
        prepare_us: float = 60.0,
        sample_us: float = 140.0,
        device_us: float = math.nan,
        between_us: float = 50.0,
        waiting: int = 0,
        bucket: int = -1,
        decisions: tuple[tuple[str, int, str], ...] = (),
        written: bool = True,
    ) -> None:
        """One step. `prompts`: prompt tokens computed, by slot; whose prompt is complete gets a
        token. Without `forward_us` it takes what such a step takes, give or take 3 %. `decisions`
        are events of the scheduling. `written` False: its frame is lost."""
        prompts = prompts or {}
        prefill = sum(prompts.values())
        if forward_us is None:
            forward_us = (DECODE_US + 40 * prefill) * (1 + 0.03 * math.sin(self.next_step))
        self.clock.ns += int(between_us * US)
        start = self.clock.ns
        for slot in prompts:
            self._admit(self.players[slot], start)
        self.clock.ns += int(schedule_us * US)
        for kind, slot, detail in decisions:
            self.event(kind, slot, detail)
        self.clock.ns += int((prepare_us + forward_us + sample_us) * US)
        rows = [self._decoded(self.players[slot]) for slot in decodes]
        rows += [self._chunk(self.players[slot], length) for slot, length in prompts.items()]
        columns = [np.array(values) for values in zip(*rows, strict=True)]
        step_id, self.next_step = self.next_step, self.next_step + 1
        if not written:
            return
        self.trace.step(
            step_id=step_id,
            start_ns=start,
            schedule_us=schedule_us,
            prepare_us=prepare_us,
            forward_us=forward_us,
            sample_us=sample_us,
            device_us=device_us,
            prefill_tokens=prefill,
            decode_tokens=len(decodes),
            running=len(rows),
            waiting=waiting,
            kv_used=90,
            kv_total=100,
            prefix_hit_tokens=0,
            graph_bucket=bucket,
            slots=columns[0].astype(np.uint32),
            positions=columns[1].astype(np.uint32),
            token_ids=columns[2].astype(np.uint32),
            phases=columns[3].astype(np.uint32),
            latency_us=columns[4].astype(np.float32),
            logprobs=np.full(len(rows), -0.5, np.float32),
            margins=np.full(len(rows), 0.5, np.float32),
            kv_blocks=np.ones(len(rows), np.uint32),
        )

    def run(self, slots: tuple[int, ...], steps: int, **changed: Any) -> None:
        """So many plain decode steps."""
        for _ in range(steps):
            self.step(slots, **changed)

    def event(self, kind: str, slot: int | None, detail: str, **changed: Any) -> None:
        self.trace.event(kind=kind, request_id=None, slot=slot, detail=detail, **changed)

    def finish(
        self, slot: int, *, reason: str = "length", stages_ms: tuple[float, ...] = ()
    ) -> None:
        """`stages_ms`: to detokenize, to serialize, to flush; default: next to nothing. Without
        a token none of it ever happened."""
        player = self.players[slot]
        if not player.tokens:
            self._write_request(player)
            times = (
                "admitted",
                "first_token",
                "last_token",
                "detokenized",
                "serialized",
                "flushed",
            )
            never = {f"{name}_ns": 0 for name in times}
            self.trace.finish(slot=slot, reason=reason, output_tokens=0, **never)
            return
        detokenize, serialize, flush = stages_ms or (0.05, 0.04, 0.02)
        detokenized = player.last_ns + int(detokenize * MS)
        serialized = detokenized + int(serialize * MS)
        flushed = serialized + int(flush * MS)
        self.clock.ns = max(self.clock.ns, flushed)
        self.trace.finish(
            slot=slot,
            reason=reason,
            output_tokens=player.tokens,
            admitted_ns=player.admitted_ns,
            first_token_ns=player.first_ns,
            last_token_ns=player.last_ns,
            detokenized_ns=detokenized,
            serialized_ns=serialized,
            flushed_ns=flushed,
        )

    def _admit(self, player: Player, now_ns: int) -> None:
        if player.admitted_ns:
            return
        player.admitted_ns = now_ns
        self._write_request(player)

    def _write_request(self, player: Player) -> None:
        self.trace.request(
            request_id=player.request_id.bytes,
            slot=player.slot,
            arrival_ns=player.arrival_ns,
            **player.fields,
        )

    def _decoded(self, player: Player) -> tuple[float, ...]:
        return (player.slot, player.tokens, 7, 0 if player.tokens else 1, self._emit(player))

    def _chunk(self, player: Player, length: int) -> tuple[float, ...]:
        player.computed += length
        if player.computed >= player.fields["prompt_tokens"] + player.tokens:
            return self._decoded(player)
        return (player.slot, player.computed - 1, NONE, 2, 0.0)

    def _emit(self, player: Player) -> float:
        latency_us = (self.clock.ns - (player.last_ns or player.arrival_ns)) / US
        player.last_ns = self.clock.ns
        player.first_ns = player.first_ns or self.clock.ns
        player.tokens += 1
        return latency_us
