"""The KV cache's blocks: who holds which, which can be shared, and which is reused next.

A block is free (no content), cached (content, no holder) or used (held by requests); the three
always add up to the pool. It handles numbers only: the memory itself belongs to the runner.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

ROOT_HASH = 0
ROOT_SERIAL = -1


class _Content(NamedTuple):
    """What a shareable block holds. `serial` is never reused, so `parent` identifies the exact
    prefix even should two prefixes' hashes collide."""

    hash: int
    tokens: tuple[int, ...]
    serial: int
    parent: int


def chain_hash(parent: int, tokens: Sequence[int]) -> int:
    """xxh3-64 of a block's token ids (int64, native order), seeded by the hash of its prefix."""
    return xxhash.xxh3_64_intdigest(array("q", tokens).tobytes(), seed=parent)


class BlockPool:
    """Fixed pool of `num_blocks` blocks of `block_size` tokens with reference counts.

    `faults` collects what should not have happened (a block released twice): the call is ignored,
    the server goes on, and the fault is reported.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self.faults: list[str] = []
        self._references = [0] * num_blocks
        self._content: list[_Content | None] = [None] * num_blocks
        self._by_hash: dict[int, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._used = 0
        self._serial = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self._used

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free ones and idle cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def extend_hashes(self, hashes: list[int], tokens: Sequence[int], blocks: int) -> None:
        """Append to `hashes` the chained hashes of `tokens`' full blocks up to number `blocks`."""
        size = self.block_size
        for i in range(len(hashes), blocks):
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(chain_hash(parent, tokens[i * size : (i + 1) * size]))

    def match(self, hashes: Sequence[int], tokens: Sequence[int], limit: int) -> list[int]:
        """The longest run of cached or used blocks that hold the prefix of `tokens`, at most
        `limit` blocks. Tokens are compared, so a hash collision never shares a wrong block."""
        found: list[int] = []
        parent = ROOT_SERIAL
        size = self.block_size
        for i, key in enumerate(hashes[:limit]):
            block = self._by_hash.get(key)
            if block is None:
                break
            content = self._content[block]
            wanted = tuple(tokens[i * size : (i + 1) * size])
            if content is None or content.parent != parent or content.tokens != wanted:
                break
            found.append(block)
            parent = content.serial
        return found

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have no holder."""
        return sum(self._references[block] == 0 for block in blocks)

    def sole(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have exactly one holder: what its release would make available."""
        return sum(self._references[block] == 1 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each of `blocks`, which a `match` has just returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
                self._used += 1
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of undefined content with one reference each, or None (and nothing
        taken) when there are not enough. Idle cached blocks are reused, longest idle first."""
        if count > self.available:
            return None
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        self._used += count
        return blocks

    def serial(self, block: int) -> int:
        """What identifies the exact prefix that ends with a shareable block."""
        content = self._content[block]
        return ROOT_SERIAL if content is None else content.serial

    def register(self, block: int, key: int, tokens: Sequence[int], parent: int) -> int | None:
        """Make a full, computed block shareable. `parent` is the serial of its prefix
        (`ROOT_SERIAL` for the first block). Returns the serial of the prefix that now ends here,
        which is that of an equal block if there is one already (this one then stays private);
        None when another prefix has the same hash and this one cannot be shared."""
        held = self._content[self._by_hash[key]] if key in self._by_hash else None
        if held is not None:
            same = held.parent == parent and held.tokens == tuple(tokens)
            return held.serial if same else None
        serial = self._serial
        self._serial += 1
        self._content[block] = _Content(key, tuple(tokens), serial, parent)
        self._by_hash[key] = block
        return serial

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference on each of a request's blocks (in the order of its table). Those
        left without holder become cached if shareable, else free; the tail is reused first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                self.faults.append(f"block {block} was released without being held")
                continue
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._used -= 1
            if self._content[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def check(self, tables: Iterable[Sequence[int]] = ()) -> str | None:
        """Verify the invariants against the block tables now held; None, or what is wrong."""
        if self.faults:
            return "; ".join(self.faults)
        total = self.free + self.cached + self.used
        if total != self.num_blocks:
            return (
                f"free {self.free} + cached {self.cached} + used {self.used} blocks are {total}, "
                f"the pool has {self.num_blocks}"
            )
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        for block, (held, counted) in enumerate(zip(expected, self._references, strict=True)):
            if held != counted:
                return f"block {block} has {held} holders and a reference count of {counted}"
        idle = set(self._free) | set(self._cached)
        if len(idle) != self.available or any(self._references[block] for block in idle):
            return "a block is on two lists, or idle while it is held"
        return None

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        content = self._content[block]
        if content is not None:
            del self._by_hash[content.hash]
            self._content[block] = None
        self.evictions += 1
        return block
