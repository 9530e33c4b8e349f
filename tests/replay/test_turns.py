"""Turns of a conversation wait for each other; conversations that open alike do not."""

from __future__ import annotations

from typing import Any

from capture.mirroring.sampling import opening_id
from capture.traffic import TrafficRecord
from replay.turns import earlier_turns
from tests.capture.test_mirror import record


def said(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def chat(number: int, *texts: str, name: str | None = None) -> TrafficRecord:
    messages = said(*texts)
    conversation = name or opening_id(b"k", "t", messages)
    return TrafficRecord.model_validate(
        record(number, messages=messages, conversation_id=conversation)
    )


def test_conversations_that_open_alike_wait_only_for_their_own_turns() -> None:
    turns = [
        chat(1, "hi"),
        chat(2, "hi"),
        chat(3, "hi", "hello", "who are you?"),
        chat(4, "hi", "good day", "what is this?"),
        chat(5, "hi", "hello", "who are you?", "a model", "which?"),
    ]
    assert earlier_turns(turns) == [None, None, 1, 1, 2]
    assert earlier_turns(turns[3:]) == [None, None], "the turns before them are not there"
    assert earlier_turns([turns[0], turns[4]]) == [None, 0], "one in between is not there"


def test_a_conversation_with_a_name_keeps_its_order_whatever_it_sends() -> None:
    turns = [
        chat(1, "a", name="c"), chat(2, "b", name="c"), chat(3, "x", name="d"), chat(4, name="c")
    ]  # fmt: skip
    assert earlier_turns(turns) == [None, 0, None, 1]


def test_instructions_that_change_with_every_turn_part_no_conversation() -> None:
    turns = []
    for number, texts in enumerate((["hi"], ["hi", "hello", "and?"]), start=1):
        messages = [{"role": "system", "content": f"It is {number} o'clock."}, *said(*texts)]
        name = opening_id(b"k", "t", messages)
        fields = record(number, messages=messages, conversation_id=name)
        turns.append(TrafficRecord.model_validate(fields))
    assert earlier_turns(turns) == [None, 0]
