"""The PyTorch runner: agreement with the compiled decoder, and results without batch effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import torch_runner
from engine.batch import Runner
from engine.errors import RunnerError
from engine.gguf import load_gguf
from engine.llama import LlamaConfig
from engine.runner import LoadedModel, load_model
from engine.torch_runner import QUERIES, TorchRunner, load_torch_runner
from tests.engine.batches import Row, all_logprobs, greedy, make_step, run
from tests.engine.test_runner import generate, prompts_of

FORMATS = ["fp32", "int8", "int4"]

# Relative RMS difference of the centred logits to the compiled decoder's, measured 3e-6 (float32),
# 0.04 (INT8), 0.04 (INT4), stated with some room. The weights are the same. INT8 activations have
# 16 bits here and 8 there; INT4 ones are bfloat16 here and INT8 there.
TINY = {"fp32": 1e-5, "int8": 0.05, "int4": 0.05}
REAL = {"fp32": 1e-4, "int8": 0.08, "int4": 0.08}


def load(path: Path, weights: str, blocks: int, max_model_len: int, threads: int) -> TorchRunner:
    file = load_gguf(path)
    config = LlamaConfig.from_gguf(file)
    return load_torch_runner(file, config, weights, 16, blocks, max_model_len, threads)


@pytest.fixture(scope="module")
def real_torch(real_path: Path) -> Callable[[str], TorchRunner]:
    """real_torch(weights): SmolLM2 in PyTorch, loaded once per format."""
    loaded: dict[str, TorchRunner] = {}

    def of(weights: str) -> TorchRunner:
        if weights not in loaded:
            loaded[weights] = load(real_path, weights, 256, 4096, threads=1)
        return loaded[weights]

    return of


@pytest.fixture(scope="module")
def tiny_torch(tiny_path: Path) -> TorchRunner:
    """The tiny model in INT8, KV cache of 256 blocks."""
    return load(tiny_path, "int8", 256, 512, threads=1)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative RMS difference of log-probabilities [P, V], each position's mean removed."""
    found, expected = (a - a.mean(axis=1, keepdims=True) for a in (found, expected))
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


def some_ids(count: int, step: int = 11) -> list[int]:
    return [(step * i) % 250 + 3 for i in range(count)]


@pytest.mark.parametrize("weights", FORMATS)
def test_logits_match_the_compiled_decoder_on_the_tiny_model(weights: str, tiny_path: Path) -> None:
    compiled = load_model(tiny_path, weights=weights, kv_tokens=512, threads=1).runner
    ours = load(tiny_path, weights, 32, 512, threads=1)
    ids, blocks = some_ids(150), [7, 3, 1, 9, 4, 30, 12, 0, 11, 5]
    found = difference(*(all_logprobs(runner, ids, blocks) for runner in (ours, compiled)))
    print(f"{weights}: relative RMS difference {found:.2e}")
    assert found < TINY[weights]


@pytest.mark.model
@pytest.mark.parametrize("weights", FORMATS)
def test_logits_match_the_compiled_decoder(
    weights: str, real_model: Callable[..., LoadedModel], real_torch: Callable[[str], TorchRunner]
) -> None:
    model, blocks = real_model(weights), [7, 3, 1, 9, 4]
    ids = model.tokenizer.encode("The capital of France is Paris. 中文 😀 def add(a, b): return a")
    ours, theirs = (all_logprobs(r, ids, blocks) for r in (real_torch(weights), model.runner))
    found, agreeing = difference(ours, theirs), (ours.argmax(1) == theirs.argmax(1)).mean()
    print(f"{weights}: relative RMS difference {found:.2e}, same argmax {agreeing:.3f}")
    assert found < REAL[weights]
    assert agreeing >= (1 if weights == "fp32" else 0.9)


@pytest.mark.model
def test_greedy_tokens_are_those_of_the_compiled_decoder_in_float32(
    real_model: Callable[..., LoadedModel], real_torch: Callable[[str], TorchRunner]
) -> None:
    model = real_model("fp32")
    prompts = prompts_of(model)[2:3]
    ours = generate(real_torch("fp32"), prompts, chunk=32)
    theirs = generate(model.runner, prompts, chunk=32)
    assert ours[0] == theirs[0]
    assert np.allclose(ours[1], theirs[1], atol=1e-3)


def top_of(runner: Runner, rows: list[Row]) -> list[tuple[list[int], list[float]]]:
    """All log-probabilities of the rows' next tokens, exactly."""
    return [(top.ids[0].tolist(), top.logprobs[0].tolist()) for top in run(runner, rows).top]


def prefill(runner: Runner, ids: list[int], blocks: list[int], chunks: list[int]) -> None:
    """Fill the cache with all tokens but the last, in the given chunks."""
    start = 0
    for chunk in chunks:
        run(runner, [Row(ids[start : start + chunk], start, blocks, None)])
        start += chunk
    assert start == len(ids) - 1


@pytest.mark.model
def test_int8_results_do_not_depend_on_chunk_prefix_or_batch(
    real_model: Callable[..., LoadedModel], real_torch: Callable[[str], TorchRunner]
) -> None:
    runner, everything = real_torch("int8"), greedy(50)
    prompts = prompts_of(real_model("int8"))
    ids = [*prompts[0], *prompts[4]][:84]  # more takes minutes where the CPU has no VNNI
    torch.set_num_threads(2)
    tables = [[16 * r + (5 * i + r) % 16 for i in range(16)] for r in range(9)]
    expected = top_of(runner, [Row(ids, 0, tables[0], everything)])[0]
    for chunk in (32, 64):
        full, rest = divmod(len(ids) - 1, chunk)
        prefill(runner, ids, tables[7], [chunk] * full + [rest])
        assert top_of(runner, [Row(ids[-1:], len(ids) - 1, tables[7], everything)])[0] == expected
    after_hit = tables[0][:4] + tables[8][4:]
    assert top_of(runner, [Row(ids[64:], 64, after_hit, everything)])[0] == expected
    rows = [
        Row(prompt[: 9 * size], 0, table, everything)
        for size, prompt, table in zip((1, 2, 3, 4), prompts, tables, strict=False)
    ]
    rows[3] = Row(ids, 0, tables[3], everything)
    assert top_of(runner, rows)[3] == expected
    decoded = [Row([9], len(row.ids), row.blocks, everything) for row in rows]
    assert top_of(runner, decoded)[3] == top_of(runner, [decoded[3]])[0]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_every_logprob_is_bit_equal_alone_chunked_batched_and_after_a_prefix_hit(
    weights: str, tiny_path: Path
) -> None:
    runner = load(tiny_path, weights, 256, 512, threads=1)
    everything, ids = greedy(runner.vocab_size), some_ids(333)
    own = [(7 * i + 5) % 32 for i in range(32)]
    expected = top_of(runner, [Row(ids, 0, own, everything)])
    for chunks in ([32] * 10 + [12], [64] * 5 + [12], [320] + [1] * 12):
        prefill(runner, ids, own, chunks)
        assert top_of(runner, [Row(ids[332:], 332, own, everything)]) == expected
    after_hit = own[:16] + list(range(32, 48))
    assert top_of(runner, [Row(ids[256:], 256, after_hit, everything)]) == expected
    others = [
        Row(some_ids(n, step), 0, list(range(64 + 24 * step, 88 + 24 * step)), everything)
        for step, n in enumerate((1, 20, 333, 128, 333, 77))
    ]
    others[2:2] = [Row(ids, 0, own, everything)]
    assert top_of(runner, others)[2] == expected[0]


@pytest.mark.parametrize("gathered", [1, 1024, 8192])
def test_decoding_beside_longer_contexts_changes_nothing(
    gathered: int, tiny_torch: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_runner, "GATHERED", gathered)
    everything = greedy(tiny_torch.vocab_size)
    lengths = (3, 127, 128, 129, 500, 40, 256, 480)
    tables = [list(range(32 * i, 32 * i + 32)) for i in range(8)]
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        run(tiny_torch, [Row(some_ids(length, i + 3), 0, table, None)])
    rows = [
        Row([9], length, table, everything) for length, table in zip(lengths, tables, strict=True)
    ]
    together = top_of(tiny_torch, rows)
    assert [top_of(tiny_torch, [row])[0] for row in rows] == together


def test_a_step_larger_than_its_pieces_gives_the_same_result(tiny_torch: TorchRunner) -> None:
    ids = some_ids(400)
    assert len(ids) > 3 * QUERIES
    rows = [Row(ids, 0, list(range(25 * r, 25 * r + 25))) for r in range(3)]
    together, alone = run(tiny_torch, rows), run(tiny_torch, rows[:1])
    assert (together.token_ids == alone.token_ids[0]).all()
    assert (together.logprobs == alone.logprobs[0]).all()


def test_prompt_logprobs_are_those_of_stepping_through(tiny_torch: TorchRunner) -> None:
    ids = some_ids(90)
    stepwise = []
    for i, token in enumerate(ids[:-1]):
        row = Row([token], i, [0, 1, 2, 3, 4, 5], greedy(tiny_torch.vocab_size))
        top = run(tiny_torch, [row]).top[0]
        stepwise.append(top.logprobs[0, np.flatnonzero(top.ids[0] == ids[i + 1])[0]])
    row = Row(ids, 0, [6, 7, 8, 9, 10, 11], None, 3, ids[1:])
    prompt = run(tiny_torch, [row]).prompt[0]
    assert prompt.chosen.tolist() == stepwise
    assert prompt.ids.shape == (89, 3)


def test_what_unused_slots_hold_does_not_matter(tiny_path: Path) -> None:
    clean, dirty = (load(tiny_path, "int8", 16, 256, threads=1) for _ in range(2))
    dirty._cache.keys.fill_(torch.nan)
    dirty._cache.values.fill_(torch.nan)
    row = Row(some_ids(33), 0, [2, 0, 5], greedy(clean.vocab_size))
    assert top_of(dirty, [row]) == top_of(clean, [row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.array([0, 1, 9999], np.int32)}, "position 9999"),
        ({"slot_mapping": np.array([0, 1, 4096], np.int64)}, "slot 4096"),
        ({"token_ids": np.array([1, 2, 300], np.int64)}, "vocabulary of 269"),
        ({"block_tables": np.array([[-1]], np.int32)}, "block table"),
        ({"context_lens": np.array([2], np.int32)}, "end where its context ends"),
    ],
)
def test_steps_that_would_touch_foreign_memory_are_refused(
    tiny_torch: TorchRunner, change: dict, message: str
) -> None:
    step = replace(make_step([Row([1, 2, 3], 0, [0])], 16), **change)
    with pytest.raises(RunnerError, match=message):
        tiny_torch.run(step)
