"""Turns of a conversation wait for each other; conversations that open alike do not."""

from __future__ import annotations

from typing import Any

from capture.sampling import opening_id
from capture.traffic import TrafficRecord
from replay.turns import Turns, turn_of
from tests.capture.test_mirror import record


def said(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def before(*records: TrafficRecord) -> list[int | None]:
    """For each record the place of the one that it goes on from."""
    turns: Turns[int] = Turns()
    found = []
    for place, item in enumerate(records):
        turn = turn_of(item)
        found.append(turns.before(turn))
        turns.note(turn, place)
    return found


def chat(number: int, *texts: str, name: str | None = None) -> TrafficRecord:
    messages = said(*texts)
    conversation = name or opening_id(b"k", "t", messages)
    return TrafficRecord.model_validate(
        record(number, messages=messages, conversation_id=conversation)
    )


def test_conversations_that_open_alike_wait_only_for_their_own_turns() -> None:
    assert before(
        chat(1, "hi"),
        chat(2, "hi"),
        chat(3, "hi", "hello", "who are you?"),
        chat(4, "hi", "good day", "what is this?"),
        chat(5, "hi", "hello", "who are you?", "a model", "which?"),
    ) == [None, None, 1, 1, 2]


def test_a_conversation_with_a_name_keeps_its_order_whatever_it_sends() -> None:
    assert before(
        chat(1, "a", name="c"), chat(2, "b", name="c"), chat(3, "x", name="d"), chat(4, name="c")
    ) == [None, 0, None, 1]
