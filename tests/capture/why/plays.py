"""Runs of an engine in which exactly one thing goes wrong for the subject, and what it is called.

`GAPS` have it in the middle of the answer, `FIRSTS` before the first token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.capture.stage import MS, US, Stage

SUBJECT = 100
MATE = 101
BEFORE, AFTER = 60, 60
LOST_MS = 27.0


def start(stage: Stage, **fields: Any) -> None:
    """The subject and a companion are admitted and decode for a while."""
    stage.arrive(MATE, tenant="mate", class_key="mate/chat/-")
    stage.step((), {MATE: 12})
    stage.arrive(SUBJECT, **fields)
    stage.step((MATE,), {SUBJECT: 12})


def decode_with(trouble: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """A scenario: steady decoding with `trouble` in the middle, which ends with a token of the
    subject."""

    def play(stage: Stage) -> None:
        start(stage)
        stage.run((MATE, SUBJECT), BEFORE)
        trouble(stage)
        stage.run((MATE, SUBJECT), AFTER)
        stage.finish(SUBJECT)
        stage.finish(MATE)

    return play


def preempted(stage: Stage) -> None:
    stage.arrive(7, priority=80, tenant="vip", class_key="vip/chat/-", prompt_tokens=20)
    stage.step((MATE,), {7: 20}, decisions=(("preempted", SUBJECT, "for priority 80"),))
    stage.run((MATE, 7), 6)
    stage.finish(7)
    stage.players[SUBJECT].computed = 0
    resumed = ("resumed", SUBJECT, "after 1 preemptions")
    stage.step((MATE,), {SUBJECT: 40}, decisions=(resumed,))
    stage.step((MATE,), {SUBJECT: 12 + stage.players[SUBJECT].tokens - 40})


def left_out(stage: Stage) -> None:
    stage.run((MATE,), 9, waiting=3)
    stage.step((MATE, SUBJECT))


def prompt_of_another(stage: Stage) -> None:
    stage.arrive(7, prompt_tokens=700, tenant="bulk", class_key="bulk/chat/-")
    stage.step((MATE, SUBJECT), {7: 700})


def new_graph(stage: Stage) -> None:
    stage.step((MATE, SUBJECT), bucket=8, forward_us=2700 + LOST_MS * US)
    stage.run((MATE, SUBJECT), 20, bucket=8)


def slow_forward(stage: Stage) -> None:
    stage.step((MATE, SUBJECT), forward_us=2700 + LOST_MS * US)


def slow_device(stage: Stage) -> None:
    """By the device's clock; the host waits for it while it samples."""
    stage.run((MATE, SUBJECT), 20, forward_us=300, sample_us=2500, device_us=2600)
    late = LOST_MS * US
    stage.step((MATE, SUBJECT), forward_us=300, sample_us=2500 + late, device_us=2600 + late)
    stage.run((MATE, SUBJECT), 20, forward_us=300, sample_us=2500, device_us=2600)


def slow_host(part: str) -> Callable[[Stage], None]:
    return lambda stage: stage.step((MATE, SUBJECT), **{part: LOST_MS * US})


def pause_in_the_schedule(stage: Stage) -> None:
    """Written down by the next step, 4 ms after the pause: the time that counts is its own."""
    stage.step((MATE, SUBJECT), schedule_us=50 + LOST_MS * US)
    late_us = 2950
    stage.event(
        "gc_pause",
        None,
        f"generation=2 collected=9 late_us={late_us}",
        duration_ns=int(LOST_MS * MS),
    )


def pause_between_steps(stage: Stage) -> None:
    stage.clock.ns += int(LOST_MS * MS)
    stage.event("gc_pause", None, "generation=2 collected=9 late_us=3", duration_ns=int(27 * MS))
    stage.step((MATE, SUBJECT))


def pause_that_cost_nothing(stage: Stage) -> None:
    """In another thread while the device worked; what was slow is the scheduling."""
    stage.step((MATE, SUBJECT), schedule_us=LOST_MS * US)
    stage.run((MATE, SUBJECT), 5)
    stage.event("gc_pause", None, "generation=2 collected=9 late_us=0", duration_ns=2 * MS)


def nothing_ran(stage: Stage) -> None:
    stage.step((MATE, SUBJECT), between_us=LOST_MS * US)


def two_causes(stage: Stage) -> None:
    stage.step((MATE, SUBJECT), schedule_us=50 + 14 * US, forward_us=2700 + 8 * US)


def steps_lost(stage: Stage) -> None:
    stage.run((MATE,), 9, written=False)
    stage.step((MATE, SUBJECT))


GAPS: dict[str, tuple[Callable[[Stage], None], str, str, float]] = {
    "preempted": (preempted, "preempted", "preempted 1 time (for priority 80) by", 30.0),
    "left out": (left_out, "not scheduled", "left out of 9 steps", 26.0),
    "prefill": (prompt_of_another, "shared a step with a prefill", "700 prompt tokens of", 28.0),
    "graph": (new_graph, "first use of a graph bucket", "the graph of 8 requests", LOST_MS),
    "forward": (slow_forward, "device slow", "forward time 29.7 ms, usually 2.7 ms", LOST_MS),
    "device": (slow_device, "device slow", "device time 29.6 ms, usually 2.7 ms", LOST_MS),
    "schedule": (slow_host("schedule_us"), "host slow", "scheduling took", LOST_MS),
    "prepare": (slow_host("prepare_us"), "host slow", "preparing took", LOST_MS),
    "sample": (slow_host("sample_us"), "host slow", "sampling took", LOST_MS),
    "gc": (pause_in_the_schedule, "garbage collection pause", "1 pause", LOST_MS),
    "gc between": (pause_between_steps, "garbage collection pause", "generation 2", LOST_MS),
    "no gc": (pause_that_cost_nothing, "host slow", "scheduling took", LOST_MS),
    "idle": (nothing_ran, "engine idle", "no step ran for 26.9 ms, usually 0.1 ms", LOST_MS),
}


def play_queue(stage: Stage) -> None:
    """Two run and keep their seats, a more important one comes later and goes first."""
    for slot in (1, 2):
        stage.arrive(slot, tenant="busy", class_key="busy/chat/-")
    stage.step((), {1: 12, 2: 12})
    stage.arrive(SUBJECT, adjustment=-10)
    stage.run((1, 2), 20, waiting=1)
    stage.arrive(3, priority=90, tenant="vip", class_key="vip/chat/-")
    stage.finish(1)
    stage.step((2,), {3: 12}, waiting=1)
    stage.run((2, 3), 20, waiting=1)
    stage.finish(2)
    stage.step((3,), {SUBJECT: 12})
    stage.run((3, SUBJECT), 30)


def play_aged(stage: Stage) -> None:
    """One of a lower priority that had waited long goes first, then the subject."""
    stage.arrive(1, tenant="busy", class_key="busy/chat/-")
    stage.step((), {1: 12})
    stage.arrive(2, priority=10, tenant="patient", class_key="patient/chat/-")
    stage.run((1,), 20, waiting=1)
    stage.arrive(SUBJECT)
    stage.run((1,), 20, waiting=2)
    stage.finish(1)
    stage.step((), {2: 12}, waiting=1, decisions=(("aged", 2, "went first for its age, 5.1 s"),))
    stage.run((2,), 20, waiting=1)
    stage.finish(2)
    stage.step((), {SUBJECT: 12})
    stage.run((SUBJECT,), 20)


def play_lifted(stage: Stage) -> None:
    """One that came later outranks the subject by the feedback policy alone."""
    stage.arrive(1, tenant="busy", class_key="busy/chat/-")
    stage.step((), {1: 12})
    stage.arrive(SUBJECT)
    stage.run((1,), 20, waiting=1)
    stage.arrive(2, adjustment=15, tenant="liked", class_key="liked/chat/-")
    stage.finish(1)
    stage.step((), {2: 12}, waiting=1)
    stage.run((2,), 20, waiting=1)
    stage.finish(2)
    stage.step((), {SUBJECT: 12})
    stage.run((SUBJECT,), 20)


def play_prefix_miss(stage: Stage) -> None:
    for slot in range(8):
        stage.arrive(slot, prompt_tokens=400, cached_tokens=360)
        stage.step((), {slot: 40})
        stage.finish(slot)
    stage.arrive(SUBJECT, prompt_tokens=400)
    stage.step((), {SUBJECT: 400})
    stage.run((SUBJECT,), 20)


def play_longer_prompt(stage: Stage) -> None:
    """What its class usually finds in the cache it found, too; the rest is its own."""
    for slot in range(8):
        stage.arrive(slot, prompt_tokens=100, cached_tokens=80)
        stage.step((), {slot: 20})
        stage.finish(slot)
    stage.arrive(SUBJECT, prompt_tokens=400, cached_tokens=80)
    stage.step((), {SUBJECT: 320})
    stage.run((SUBJECT,), 20)


def play_prefill(stage: Stage) -> None:
    """Nobody's prompts are ever cached: computing it is what a first token costs."""
    for slot in range(8):
        stage.arrive(slot, prompt_tokens=400)
        stage.step((), {slot: 400})
        stage.finish(slot)
    stage.arrive(SUBJECT, prompt_tokens=400)
    stage.step((), {SUBJECT: 200})
    stage.step((), {SUBJECT: 200})
    stage.run((SUBJECT,), 20)


def play_shared_prefill(stage: Stage) -> None:
    stage.arrive(SUBJECT, prompt_tokens=40)
    stage.arrive(5, prompt_tokens=900, tenant="bulk", class_key="bulk/chat/-")
    stage.step((), {5: 400, SUBJECT: 20})
    stage.step((), {5: 400, SUBJECT: 20})
    stage.run((SUBJECT,), 20)


def play_slow_server(stage: Stage) -> None:
    """The engine had nothing to do while the prompt was read and tokenized."""
    stage.arrive(SUBJECT)
    stage.clock.ns += 200 * MS
    stage.step((), {SUBJECT: 12})
    stage.run((SUBJECT,), 20)
    stage.finish(SUBJECT)


def play_preempted_prefill(stage: Stage) -> None:
    stage.arrive(MATE)
    stage.step((), {MATE: 12})
    stage.arrive(SUBJECT, prompt_tokens=100)
    stage.step((MATE,), {SUBJECT: 40})
    stage.step((MATE,), decisions=(("preempted", SUBJECT, "out of KV blocks"),))
    stage.run((MATE,), 20)
    stage.players[SUBJECT].computed = 0
    resumed = ("resumed", SUBJECT, "after 1 preemptions")
    stage.step((MATE,), {SUBJECT: 100}, decisions=(resumed,))
    stage.run((MATE, SUBJECT), 20)


def play_jitter(stage: Stage) -> None:
    """Everything varies by some percent, as on a real machine."""
    chance = random.Random(7)

    def around(us: float) -> float:
        return us * max(0.5, chance.gauss(1.0, 0.08))

    start(stage)
    for _ in range(200):
        stage.step(
            (MATE, SUBJECT),
            forward_us=around(2700),
            schedule_us=around(50),
            prepare_us=around(60),
            sample_us=around(140),
            between_us=around(50),
        )
    stage.finish(SUBJECT)


FIRSTS: dict[str, tuple[Callable[[Stage], None], str, str]] = {
    "queued": (play_queue, "queued", "behind 3 running"),
    "aged": (
        play_aged,
        "queued",
        "1 with a lower priority went first for its age; 2 waiting, KV cache 90 % full; "
        "its priority was 50",
    ),
    "lifted": (play_lifted, "queued", "1 with a higher priority, 1 only by the feedback policy"),
    "prefix miss": (
        play_prefix_miss,
        "prefix miss",
        "0 of 400 prompt tokens cached, usually 360",
    ),
    "longer prompt": (play_longer_prompt, "prefill", "400 prompt tokens, 80 of them cached"),
    "prefill": (play_prefill, "prefill", "400 prompt tokens, 0 of them cached, in 2 steps"),
    "shared": (play_shared_prefill, "shared a step with a prefill", "800 prompt tokens of"),
    "slow server": (play_slow_server, "engine idle", "between its arrival and its admission"),
    "preempted": (play_preempted_prefill, "preempted", "out of KV blocks"),
}


def play_slow_client(stage: Stage) -> None:
    decode_with(lambda _: None)(stage)
    stage.arrive(1)
    stage.step((), {1: 12})
    stage.finish(1)
    stage.arrive(SUBJECT + 2)
    stage.step((), {SUBJECT + 2: 12})
    stage.finish(SUBJECT + 2, stages_ms=(0.1, 900, 5))


def play_late_chunk(stage: Stage) -> None:
    """The engine was steady; one chunk reached the socket late, the end did not."""
    start(stage)
    stage.run((MATE, SUBJECT), BEFORE)
    stage.event("sent_late", SUBJECT, "position=31 chunks=4", duration_ns=int(350 * MS))
    stage.finish(SUBJECT)


def play_shared_id(stage: Stage) -> None:
    """Two calls of a client under one trace id, one after the other."""
    first = stage.arrive(SUBJECT)
    stage.step((), {SUBJECT: 12})
    stage.run((SUBJECT,), 40)
    stage.step((SUBJECT,), sample_us=LOST_MS * US)
    stage.finish(SUBJECT)
    stage.arrive(SUBJECT + 1, request_id=first.request_id)
    stage.step((), {SUBJECT + 1: 12})
    stage.run((SUBJECT + 1,), 40)
    stage.step((SUBJECT + 1,), forward_us=LOST_MS * US)


RUNNING, FAILED, ABORTED, ONE, NONE = 10, 11, 12, 13, 14


def play_ends(stage: Stage) -> None:
    """Requests that ended otherwise than well, or not at all."""
    for slot in (RUNNING, FAILED, ABORTED, ONE):
        stage.arrive(slot)
        stage.step((), {slot: 12})
    stage.finish(ONE, reason="stop")
    stage.run((RUNNING, FAILED, ABORTED), 30)
    stage.finish(FAILED, reason="error")
    stage.finish(ABORTED, reason="abort")
    stage.arrive(NONE)
    stage.run((RUNNING,), 30)
    stage.finish(NONE, reason="abort")
    stage.step((RUNNING,), forward_us=2700 + LOST_MS * US)
    stage.run((RUNNING,), 20)


PLAYS: dict[str, Callable[[Stage], None]] = {
    **{f"gap: {name}": decode_with(trouble) for name, (trouble, *_) in GAPS.items()},
    **{f"first: {name}": play for name, (play, *_) in FIRSTS.items()},
    "steady": decode_with(lambda _: None),
    "jitter": play_jitter,
    "two causes": decode_with(two_causes),
    "lost": decode_with(steps_lost),
    "proxy": decode_with(slow_forward),
    "sending": play_slow_client,
    "late chunk": play_late_chunk,
    "shared id": play_shared_id,
    "ends": play_ends,
}
