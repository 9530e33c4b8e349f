"""Which earlier request a request goes on from, as the turns of a conversation do.

A conversation that its client named is taken at its word. One that was told by how it opens
(`capture.sampling.opening_id`) may be several that open alike: there a turn is what repeats
another's messages and adds to them. Not for when turns are sent (`replay.pacing`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Generic, NamedTuple, TypeVar

from capture.sampling import OPENING_PREFIX
from capture.traffic import TrafficRecord

T = TypeVar("T")
Key = tuple[str, bytes]


class Turn(NamedTuple):
    """What a request is known by, and what the turns before it may be known by, latest first."""

    key: Key
    before: list[Key]


class Turns(Generic[T]):
    """Remembers something, such as its task, for each request that may be gone on from."""

    def __init__(self) -> None:
        self._noted: dict[Key, T] = {}

    def note(self, turn: Turn, value: T) -> None:
        self._noted[turn.key] = value

    def before(self, turn: Turn) -> T | None:
        """What was noted for the request that this one goes on from."""
        return next((self._noted[key] for key in turn.before if key in self._noted), None)


def turn_of(record: TrafficRecord) -> Turn:
    """Where a record stands in its conversation."""
    name = record.conversation_id
    if not name.startswith(OPENING_PREFIX) or record.messages is None:
        key = (name, b"")
        return Turn(key, [key])
    digest = hashlib.blake2s()
    keys = []
    for message in record.messages:
        digest.update(json.dumps(message, sort_keys=True).encode())
        keys.append((name, digest.digest()))
    *before, key = keys or [(name, b"")]
    return Turn(key, before[::-1])
