"""The arrays of a step, against what the contract says of each, computed token by token."""

from __future__ import annotations

from engine.batching import build_batch
from engine.request import Request, SamplingParams
from engine.seats import Seats
from engine.step import Chunk, Step

SIZE = 4


def request(row: int, tokens: int, computed: int, table: list[int], **params: int) -> Request:
    made = Request(bytes(16), [100 * row + i for i in range(tokens)], SamplingParams(9, **params))
    made.row, made.slot, made.computed, made.block_table = row, row + 10, computed, table
    return made


def test_every_token_has_its_position_and_its_place_in_the_cache() -> None:
    seats = Seats(max_running=4, max_blocks=6)
    decode = request(2, 6, 5, [7, 3], logprobs=2)
    last = request(0, 9, 4, [1, 9, 5])
    part = request(3, 20, 0, [0, 2, 4, 6, 8], prompt_logprobs=1)
    step = Step(
        decodes=[decode],
        chunks=[Chunk(last, 4, 5, last=True), Chunk(part, 0, 3, last=False)],
        grown=[decode, last, part],
    )
    batch = build_batch(step, seats, seats.update(step), SIZE)

    assert batch.query_start.tolist() == [0, 1, 6, 9]
    assert batch.context_lens.tolist() == [6, 9, 3]
    rows = [(decode, [5]), (last, [4, 5, 6, 7, 8]), (part, [0, 1, 2])]
    spots = [(owner, position) for owner, positions in rows for position in positions]
    assert batch.positions.tolist() == [position for _, position in spots]
    assert batch.token_ids.tolist() == [owner.tokens[position] for owner, position in spots]
    assert batch.slot_mapping.tolist() == [
        owner.block_table[position // SIZE] * SIZE + position % SIZE for owner, position in spots
    ]
    assert batch.block_tables.tolist() == [
        [7, 3, -1, -1, -1],
        [1, 9, 5, -1, -1],
        [0, 2, 4, 6, 8],
    ]
    drawn = [None if s is None else (s.position, s.top_logprobs) for s in batch.sampling]
    assert drawn == [(6, 2), (9, 0), None]
    assert batch.prompt_logprobs == [None, None, 1]
    assert batch.prompt_targets[2] is not None
    assert batch.prompt_targets[2].tolist() == part.tokens[1:4]


def test_seat_taken_over_shows_nothing_of_its_last_owner() -> None:
    seats = Seats(max_running=1, max_blocks=4)
    first = request(0, 9, 8, [3, 2, 1])
    seats.update(Step(decodes=[first], grown=[first]))
    second = request(0, 2, 1, [5])
    step = Step(decodes=[second], grown=[second])
    assert build_batch(step, seats, seats.update(step), SIZE).block_tables.tolist() == [[5]]
    assert seats.tables[0].tolist() == [5, -1, -1, -1]
    assert not seats.started[0]


def test_request_preempted_after_it_was_given_a_block_disturbs_no_seat() -> None:
    seats = Seats(max_running=2, max_blocks=4)
    stays = request(1, 6, 5, [3, 2])
    gone = request(-1, 6, 0, [])
    step = Step(decodes=[stays], grown=[stays, gone])
    seats.update(step)
    assert seats.tables[1].tolist() == [3, 2, -1, -1]
