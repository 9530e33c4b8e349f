"""The block pool: nothing is lost or held twice, and only equal prefixes are shared."""

from __future__ import annotations

import pytest

from engine import blocks
from engine.blocks import ROOT_SERIAL, BlockPool


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate and register all full blocks of `tokens`, as a computed prompt would."""
    table = pool.allocate(pool.blocks_for(len(tokens)))
    assert table is not None
    hashes: list[int] = []
    full = len(tokens) // pool.block_size
    pool.extend_hashes(hashes, tokens, full)
    serial: int | None = ROOT_SERIAL
    for i in range(full):
        assert serial is not None
        piece = tokens[i * pool.block_size : (i + 1) * pool.block_size]
        serial = pool.register(table[i], hashes[i], piece, serial)
    return table


def find(pool: BlockPool, tokens: list[int]) -> list[int]:
    hashes: list[int] = []
    limit = len(tokens) // pool.block_size
    pool.extend_hashes(hashes, tokens, limit)
    return pool.match(hashes, tokens, limit)


def test_prefix_is_shared_while_used_and_after() -> None:
    pool = BlockPool(8, 4)
    table = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert find(pool, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == table[:2]
    pool.release(table)
    assert (pool.free, pool.cached, pool.used) == (6, 2, 0)
    hits = find(pool, [1, 2, 3, 4, 9, 9, 9, 9])
    assert hits == table[:1]
    pool.share(hits)
    assert (pool.free, pool.cached, pool.used) == (6, 1, 1)
    assert pool.check([hits]) is None


def test_longest_idle_block_is_reused_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, 2)
    old, new = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert find(pool, [1, 2, 3, 4]) == [old[0]]
    assert find(pool, [5, 6, 7, 8]) == new
    assert pool.evictions == 1


def test_colliding_hashes_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "chain_hash", lambda parent, tokens: 7)
    pool = BlockPool(8, 2)
    fill(pool, [1, 2])
    assert find(pool, [3, 4]) == []
    assert find(pool, [1, 2]) != []
    fill(pool, [3, 4])
    assert find(pool, [3, 4]) == []


def test_child_of_an_evicted_prefix_is_not_found_under_a_new_one() -> None:
    pool = BlockPool(3, 2)
    table = fill(pool, [1, 2, 3, 4])
    pool.release(table[:1])
    assert pool.allocate(2) is not None
    assert find(pool, [1, 2, 3, 4]) == []


def test_equal_block_computed_twice_is_shared_once_and_its_children_still_are() -> None:
    pool = BlockPool(8, 2)
    first = fill(pool, [1, 2])
    second = fill(pool, [1, 2, 3, 4])
    assert find(pool, [1, 2, 3, 4]) == [first[0], second[1]]


def test_not_enough_blocks_takes_none() -> None:
    pool = BlockPool(2, 4)
    assert pool.allocate(3) is None
    assert pool.available == 2


def test_double_release_is_ignored_and_reported() -> None:
    pool = BlockPool(2, 4)
    table = pool.allocate(1)
    assert table is not None
    pool.release(table)
    pool.release(table)
    assert pool.available == 2
    assert "without being held" in str(pool.check())


def test_check_names_a_lost_reference() -> None:
    pool = BlockPool(2, 4)
    table = pool.allocate(1)
    assert table is not None
    assert pool.check([table]) is None
    assert "0 holders and a reference count of 1" in str(pool.check())
