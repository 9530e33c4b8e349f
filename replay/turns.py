"""Which earlier request a request goes on from, as the turns of a conversation do.

A conversation that its client named is taken at its word. One that was told by how it opens
(`opening_id` of `capture.mirroring.sampling`) may be several that open alike: there a turn is what
repeats another's messages and adds to them. Not for when turns are sent (`replay.pacing`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from capture.mirroring.sampling import INSTRUCTIONS, OPENING_PREFIX
from capture.traffic import TrafficRecord

Key = tuple[str, bytes]


def earlier_turns(records: Iterable[TrafficRecord]) -> list[int | None]:
    """For each record the place of the one that it goes on from, always an earlier one."""
    latest: dict[Key, int] = {}
    found = []
    for place, record in enumerate(records):
        *before, own = _keys(record)
        found.append(next((latest[key] for key in reversed(before) if key in latest), None))
        latest[own] = place
    return found


def _keys(record: TrafficRecord) -> list[Key]:
    """What the turns before it are known by, the latest last, and after them the record itself."""
    name = record.conversation_id
    if not name.startswith(OPENING_PREFIX):
        return [(name, b"")] * 2
    digest = hashlib.blake2s()
    keys = []
    for message in record.messages or ():
        if message.get("role") not in INSTRUCTIONS:  # which may change with every turn
            digest.update(json.dumps(message, sort_keys=True).encode())
            keys.append((name, digest.digest()))
    return keys or [(name, b"")]
