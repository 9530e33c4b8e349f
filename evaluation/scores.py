"""Diff scores per request class, shrunk toward the parent class.

A label -1/0/+1 counts 0, 0.5 or 1; a class's diff score is its mean, so an all-neutral class has
0.5. Scores come from offline labels only, never from production results, which a changed priority
would change in turn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.judgements import parents
from evaluation.statistics import bounded_mean

NEUTRAL = 0.5
DEFAULT_PRIOR = 10.0
"""What the parent's score weighs, in labels, when the classes do not tell."""
LEAST_PRIOR = 2.0
"""Never less than this many labels: two equal labels do not make a class certain."""


@dataclass(frozen=True)
class ClassScore:
    """`mean` of the class's own labels, `score` after shrinking, anytime-valid `upper` bound of
    the own mean."""

    class_key: str
    labels: int
    mean: float
    score: float
    upper: float


def class_scores(verdicts: Sequence[tuple[str, int]], confidence: float) -> dict[str, ClassScore]:
    """Scores of every class and parent class that has labels, by key.

    `verdicts` are (class key, -1/0/+1) in the order they were drawn. A class's score is
    Z * mean + (1 - Z) * parent's score with Z = n / (n + k); a tenant's parent is everything, and
    the parent of everything is neutral. k is estimated per level by `credibility_prior`.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for class_key, verdict in verdicts:
        for key in parents(class_key):
            values[key].append((verdict + 1) / 2)
    everything = [(verdict + 1) / 2 for _, verdict in verdicts]
    top = _shrink(everything, NEUTRAL, DEFAULT_PRIOR)
    priors = _priors(values)
    scores: dict[str, ClassScore] = {}
    for key in sorted(values, key=lambda key: (key.count("/"), key)):
        parent = scores.get(key.rpartition("/")[0])
        score = _shrink(
            values[key], top if parent is None else parent.score, priors[key.count("/")]
        )
        scores[key] = ClassScore(
            class_key=key,
            labels=len(values[key]),
            mean=float(np.mean(values[key])),
            score=score,
            upper=bounded_mean(values[key], confidence).upper,
        )
    return scores


def credibility_prior(groups: Sequence[Sequence[float]]) -> float:
    """k = variance within groups / variance between their means: labels the parent is worth.

    Infinite when the groups differ no more than chance makes them. Source: Buehlmann and Straub,
    ASTIN Bulletin 5 (1970); estimators as in Klugman, Panjer, Willmot, Loss Models, nonparametric
    empirical Bayes. With fewer than two groups, or none with two values, `DEFAULT_PRIOR`.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    sizes = np.array([array.size for array in arrays], dtype=np.float64)
    total = float(sizes.sum())
    freedom = float((sizes - 1).sum())
    if len(arrays) < 2 or freedom == 0:
        return DEFAULT_PRIOR
    means = np.array([array.mean() for array in arrays])
    within = sum(float(((a - m) ** 2).sum()) for a, m in zip(arrays, means, strict=True)) / freedom
    overall = float((sizes * means).sum()) / total
    spread = float((sizes * (means - overall) ** 2).sum()) - (len(arrays) - 1) * within
    between = spread / (total - float((sizes**2).sum()) / total)
    if between <= 0:
        return math.inf
    return max(within / between, LEAST_PRIOR)


def _priors(values: Mapping[str, Sequence[float]]) -> dict[int, float]:
    levels: dict[int, list[Sequence[float]]] = defaultdict(list)
    for key, group in values.items():
        levels[key.count("/")].append(group)
    return {level: credibility_prior(groups) for level, groups in levels.items()}


def _shrink(values: Sequence[float], parent: float, prior: float) -> float:
    if not values or math.isinf(prior):
        return parent
    weight = len(values) / (len(values) + prior)
    return weight * float(np.mean(values)) + (1 - weight) * parent
