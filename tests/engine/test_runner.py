"""The runner driven directly: results that do not depend on the batch, and its refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.batch import Runner
from engine.errors import EngineError, RunnerError
from engine.runner import LoadedModel, load_model
from tests.engine.batches import Row, all_logprobs, greedy, make_step, run

PROMPTS = [
    "Explain in one paragraph why the sky is blue, and why sunsets are red. Mention Rayleigh"
    " scattering, wavelengths, and the path of light through the atmosphere; then give a formula"
    " and say what each symbol in it means, with units.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three fruits.",
    "翻译成英文：今天天气很好。",
    "What is 17 * 23? Show the steps.",
    "Summarize: the quick brown fox jumps over the lazy dog. 😀",
    "Hello",
]
TOKENS = 24


def prompts_of(model: LoadedModel) -> list[list[int]]:
    render, encode = model.template.render, model.tokenizer.encode
    return [encode(render([{"role": "user", "content": p}]), special=True) for p in PROMPTS]


def blocks_for(index: int, size: int) -> list[int]:
    """A request's own blocks, 256 tokens, deliberately not in order."""
    count = 256 // size
    return [index * count + (5 * i + index) % count for i in range(count)]


def generate(runner: Runner, prompts: list[list[int]], chunk: int, first_index: int = 0):
    """Greedy continuation of all prompts at once: ids [R, TOKENS], logprobs [R, TOKENS].

    Prompts go in chunks; a prompt that is done decodes beside the chunks of longer ones.
    """
    size = runner.block_size
    done = [0] * len(prompts)
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    while any(len(row) < TOKENS for row in ids):
        rows, owners = [], []
        for i, prompt in enumerate(prompts):
            if len(ids[i]) == TOKENS:
                continue
            blocks = blocks_for(first_index + i, size)
            if done[i] < len(prompt):
                part = prompt[done[i] : done[i] + chunk]
                last = done[i] + len(part) == len(prompt)
                rows.append(Row(part, done[i], blocks, greedy() if last else None))
            else:
                rows.append(Row(ids[i][-1:], done[i], blocks))
            done[i] += len(rows[-1].ids)
            owners.append(i)
        result = run(runner, rows)
        for row, i in enumerate(owners):
            if result.token_ids[row] >= 0:
                ids[i].append(int(result.token_ids[row]))
                logprobs[i].append(float(result.logprobs[row]))
    return ids, logprobs


@pytest.mark.model
@pytest.mark.parametrize("weights", ["int8", "int4", "fp32"])
def test_tokens_do_not_depend_on_batch_or_chunk(
    weights: str, real_model: Callable[..., LoadedModel]
) -> None:
    model = real_model(weights)
    prompts = prompts_of(model)
    together = generate(model.runner, prompts, chunk=64)
    assert generate(model.runner, prompts, chunk=32) == together
    for i in (0, 3):
        alone = generate(model.runner, [prompts[i]], chunk=512, first_index=9)
        assert alone == ([together[0][i]], [together[1][i]])


@pytest.mark.model
def test_tokens_do_not_depend_on_the_block_size(real_model: Callable[..., LoadedModel]) -> None:
    small, large = real_model("int8", 16), real_model("int8", 32)
    prompts = prompts_of(small)[:2]
    assert generate(small.runner, prompts, 64) == generate(large.runner, prompts, 64)


@pytest.mark.model
def test_tokens_are_the_same_after_a_prefix_hit(real_model: Callable[..., LoadedModel]) -> None:
    model = real_model("int8")
    prompt, size = prompts_of(model)[0], model.runner.block_size
    own = blocks_for(1, size)
    cold = run(model.runner, [Row(prompt, 0, own)])
    cached = (len(prompt) - 1) // size * size
    shared = own[: cached // size] + blocks_for(2, size)
    warm = run(model.runner, [Row(prompt[cached:], cached, shared)])
    assert warm.token_ids[0] == cold.token_ids[0]
    assert warm.logprobs[0] == cold.logprobs[0]


def test_a_step_larger_than_the_buffers_gives_the_same_result(tiny_path) -> None:
    model = load_model(tiny_path, weights="int8", kv_tokens=2048, threads=2)
    ids = [(7 * i) % 250 + 3 for i in range(400)]
    rows = [Row(ids, 0, list(range(25 * r, 25 * r + 25))) for r in range(3)]
    together = run(model.runner, rows)
    alone = run(model.runner, rows[:1])
    assert (together.token_ids == alone.token_ids[0]).all()
    assert (together.logprobs == alone.logprobs[0]).all()


def test_the_time_for_prompt_logprobs_is_sampling_time(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step that scores prompts would look as if nothing ran in it."""
    runner = tiny_model.runner
    ids = list(range(3, 43))
    row = Row(ids, 0, [0, 1, 2], None, 3, ids[1:])
    head = type(runner)._head

    def slow_head(self: object, hidden: np.ndarray) -> object:
        time.sleep(0.02)
        return head(self, hidden)

    monkeypatch.setattr(type(runner), "_head", slow_head)
    assert run(runner, [row]).sample_us >= 20_000


def test_prompt_logprobs_are_those_of_stepping_through(tiny_model: LoadedModel) -> None:
    runner = tiny_model.runner
    ids = [(11 * i) % 250 + 3 for i in range(90)]
    stepwise = []
    for i, token in enumerate(ids[:-1]):
        result = run(runner, [Row([token], i, [0, 1, 2, 3, 4, 5], greedy(runner.vocab_size))])
        column = int(np.flatnonzero(result.top[0].ids[0] == ids[i + 1])[0])
        stepwise.append(result.top[0].logprobs[0, column])
    chunks = []
    for start in range(0, 90, 40):
        part = ids[start : start + 40]
        row = Row(
            part, start, [6, 7, 8, 9, 10, 11], None, 3, ids[start + 1 : start + 1 + len(part)]
        )
        chunks.append(run(runner, [row]).prompt[0])
    chosen = np.concatenate([chunk.chosen for chunk in chunks])
    assert chosen.tolist() == stepwise
    for chunk in chunks:
        assert chunk.ids.shape == (chunk.chosen.size, 3)
        assert (np.diff(chunk.logprobs, axis=1) <= 0).all()
        top = np.where(chunk.rank == 1, chunk.chosen, chunk.logprobs[:, 0])
        assert (top == chunk.logprobs[:, 0]).all()


def test_log_probabilities_sum_to_one(tiny_model: LoadedModel) -> None:
    logprobs = all_logprobs(tiny_model.runner, [5, 6, 7, 8], [0])
    assert np.exp(logprobs.astype(np.float64)).sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_a_row_reports_margin_and_its_own_logprob(tiny_model: LoadedModel) -> None:
    result = run(tiny_model.runner, [Row([5, 6, 7], 0, [0], greedy(2)), Row([5, 6], 0, [1], None)])
    top = result.top[0]
    assert result.token_ids[0] == top.ids[0, 0]
    assert result.logprobs[0] == top.logprobs[0, 0] == top.chosen[0]
    assert result.margins[0] == pytest.approx(top.logprobs[0, 0] - top.logprobs[0, 1], abs=1e-5)
    assert result.token_ids[1] == -1
    assert np.isnan(result.logprobs[1])
    assert result.top[1] is None


def test_what_unused_blocks_hold_does_not_matter(tiny_path) -> None:
    ids = [(13 * i) % 250 + 3 for i in range(33)]
    clean = load_model(tiny_path, weights="fp32", kv_tokens=256, threads=1).runner
    dirty = load_model(tiny_path, weights="fp32", kv_tokens=256, threads=1).runner
    for array in dirty._cache:
        array[:] = np.nan
    for blocks in ([2, 0, 5], [7, 6, 1]):
        expected, found = (run(r, [Row(ids, 0, blocks, greedy(5))]) for r in (clean, dirty))
        assert found.logprobs[0] == expected.logprobs[0]
        assert found.top[0].ids.tolist() == expected.top[0].ids.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.array([0, 1, 9999], np.int32)}, "position 9999"),
        ({"slot_mapping": np.array([0, 1, 1024], np.int64)}, "slot 1024"),
        ({"token_ids": np.array([1, 2, 300], np.int64)}, "vocabulary of 269"),
        ({"block_tables": np.array([[-1]], np.int32)}, "block table"),
        ({"block_tables": np.array([[64]], np.int32)}, "block table"),
        ({"context_lens": np.array([17], np.int32)}, "block table"),
        ({"context_lens": np.array([2], np.int32)}, "end where its context ends"),
    ],
)
def test_steps_that_would_touch_foreign_memory_are_refused(
    tiny_model: LoadedModel, change: dict, message: str
) -> None:
    step = replace(make_step([Row([1, 2, 3], 0, [0])], 16), **change)
    with pytest.raises(RunnerError, match=message):
        tiny_model.runner.run(step)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 8}, "block size 8 is not a multiple of 16"),
        ({"kv_tokens": 15}, "holds no block of 16"),
        ({"max_model_len": 513}, "outside 1..512"),
        ({"max_model_len": 0}, "outside 1..512"),
        ({"kv_tokens": 64, "max_model_len": 65}, "raise --kv-tokens"),
        ({"threads": 0}, "threads"),
    ],
)
def test_impossible_sizes_are_refused(tiny_path, sizes: dict, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        load_model(tiny_path, weights="int8", **sizes)


def test_info_describes_the_build(tiny_model: LoadedModel) -> None:
    info = tiny_model.info
    assert info["architecture"] == "llama"
    assert info["quantization"] == {"Q8_0": 1, "Q4_1": 14, "F32": 5}
    assert (info["weights"], info["block_size"], info["num_blocks"]) == ("int8", 16, 64)
    assert len(info["sha256"]) == 64
