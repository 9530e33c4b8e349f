"""Sampling: what may be drawn, how often, and that a draw depends on its own row only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.batch import RowSampling
from engine.runner import LoadedModel
from engine.sampler import alternatives, draw, uniform
from kernels.cpu_sample import top_tokens
from tests.engine.batches import Row, greedy, run


def sampling(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, position: int = 0
) -> RowSampling:
    return RowSampling(temperature, top_p, top_k, seed, position, 0)


def counts(logits: np.ndarray, settings: RowSampling, draws: int = 4000) -> np.ndarray:
    found = np.zeros(logits.size, np.int64)
    best = int(logits.argmax())
    for position in range(draws):
        row = RowSampling(
            settings.temperature, settings.top_p, settings.top_k, settings.seed, position, 0
        )
        found[draw(logits, best, row)] += 1
    return found


def expected_probabilities(logits: np.ndarray, s: RowSampling) -> np.ndarray:
    """By the definition: cut to top-k, renormalise, cut to the top-p nucleus, renormalise."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / s.temperature)
    order = np.lexsort((np.arange(p.size), -logits))
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    cumulative = np.cumsum(p[order])
    p[order[np.concatenate([[False], cumulative[:-1] >= s.top_p])]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "settings",
    [
        sampling(),
        sampling(temperature=0.5),
        sampling(temperature=2.0, top_k=7),
        sampling(top_p=0.6),
        sampling(temperature=1.5, top_p=0.8, top_k=10, seed=2**63 + 5),
    ],
)
def test_frequencies_follow_the_distribution(settings: RowSampling) -> None:
    logits = np.random.default_rng(0).normal(0, 1.5, 30).astype(np.float32)
    found = counts(logits, settings)
    p = expected_probabilities(logits, settings)
    assert not found[p == 0].any()
    common = p * found.sum() >= 5
    observed = [*found[common], found[~common].sum()]
    wanted = np.array([*p[common], p[~common].sum()]) * found.sum()
    keep = wanted > 0
    outcome = stats.chisquare(np.array(observed)[keep], wanted[keep])
    assert outcome.pvalue > 1e-3


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10_000),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 2000),
    temperature=st.floats(0.05, 5.0),
    size=st.integers(1, 1500),
)
def test_draws_stay_inside_the_cut(
    seed: int, position: int, top_p: float, top_k: int, temperature: float, size: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 0.3, size).astype(np.float32)
    s = sampling(temperature, top_p, top_k, seed, position)
    token = draw(logits, int(logits.argmax()), s)
    wider = sampling(temperature, min(1.0, top_p + 1e-9), top_k)
    assert expected_probabilities(logits, wider)[token] > 0
    assert token == draw(logits, int(logits.argmax()), s)


def test_greedy_and_degenerate_settings_take_the_best() -> None:
    logits = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    for s in (sampling(temperature=0), sampling(top_k=1), sampling(top_p=1e-9)):
        assert draw(logits, 1, s) == 1
    assert draw(logits, 1, sampling(temperature=1e-6, top_p=0.4)) == 1


def test_a_wide_nucleus_is_found_beyond_the_first_guess() -> None:
    logits = np.zeros(3000, np.float32)
    found = counts(logits, sampling(top_p=0.9), draws=3000)
    assert not found[2700:].any()
    assert found[:2700].any()
    assert np.flatnonzero(found).max() > 2500


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    by_position = np.array([uniform(1, p) for p in range(20_000)])
    by_seed = np.array([uniform(s, 1) for s in range(20_000)])
    for numbers in (by_position, by_seed):
        assert 0 <= numbers.min() < numbers.max() < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    # Neighbouring seeds must not give one another's stream, shifted.
    assert not set(by_position[:1000]) & {uniform(2, p) for p in range(1000)}


@pytest.mark.parametrize("spread", [2, 1000])
def test_top_tokens_order_equals_by_id(spread: int) -> None:
    logits = np.random.default_rng(0).integers(0, spread, 500).astype(np.float32)
    expected = np.lexsort((np.arange(500), -logits))
    for k in (1, 2, 20, 64, 65, 500):
        assert top_tokens(logits, k).tolist() == expected[:k].tolist()


def test_alternatives_report_raw_logprobs_and_rank() -> None:
    logits = np.log(np.array([[0.5, 0.2, 0.3]], np.float32)) + 4
    top = alternatives(logits, np.array([4.0]), np.array([1]), 2)
    assert top.ids.tolist() == [[0, 2]]
    assert np.allclose(np.exp(top.logprobs), [[0.5, 0.3]])
    assert np.exp(top.chosen[0]) == pytest.approx(0.2)
    assert top.rank.tolist() == [3]


def test_a_seeded_row_draws_the_same_beside_any_mates(tiny_model: LoadedModel) -> None:
    runner = tiny_model.runner

    def row(i: int, seed: int) -> Row:
        s = RowSampling(1.3, 0.95, 0, seed, 4, 3)
        return Row([5 + i, 6, 7, 8], 0, [i], s)

    alone = run(runner, [row(0, 42)])
    mates = [row(i, i) for i in range(1, 7)] + [Row([9, 9], 0, [9], greedy())]
    for order in ([*mates, row(0, 42)], [row(0, 42), *mates]):
        result = run(runner, order)
        at = order.index(next(r for r in order if r.blocks == [0]))
        assert result.token_ids[at] == alone.token_ids[0]
        assert result.logprobs[at] == alone.logprobs[0]
        assert np.array_equal(result.top[at].logprobs, alone.top[0].logprobs)
