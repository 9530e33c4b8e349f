"""A request's answer as it grows: what the engine's tests do not reach."""

from __future__ import annotations

import numpy as np

from engine.batch import TopLogprobs
from engine.output import Output
from engine.request import Request, SamplingParams
from tests.engine.fake_runner import ByteTokenizer


def scored(count: int) -> TopLogprobs:
    return TopLogprobs(
        ids=np.zeros((count, 0), np.int64),
        logprobs=np.zeros((count, 0), np.float32),
        chosen=np.arange(count, dtype=np.float32),
        rank=np.ones(count, np.int64),
    )


def test_prompt_recomputed_after_preemption_is_scored_once() -> None:
    request = Request(bytes(16), [1, 2, 3, 4, 5], SamplingParams(1, prompt_logprobs=0))
    output = Output(request, ByteTokenizer())
    output.add_prompt(0, scored(3))
    output.add_prompt(0, scored(2))
    output.add_prompt(2, scored(2))
    assert [position[0].token_id for position in output.prompt] == [2, 3, 4, 5]
    assert [position[0].logprob for position in output.prompt] == [0, 1, 0, 1]


def test_character_completed_by_the_end_may_complete_a_stop_string() -> None:
    request = Request(bytes(16), [1], SamplingParams(2, stop=("a�",)))
    output = Output(request, ByteTokenizer())
    texts = []
    for token in (ord("a"), 0xF0):
        request.tokens.append(token)
        texts.append(output.add(token, -1.0, 1.0, None, 0).text)
    assert texts == ["", ""]
    assert (output.finish_reason, output.stop_reason) == ("stop", "a�")
