"""The gate's criteria, one function each: value found, bound, outcome and what is missing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from evaluation.gate_policy import GatePolicy
from evaluation.latency import LatencyRatio
from evaluation.statistics import Interval, successes_free_needed, wilson
from evaluation.tally import Resolved, Tally, tally
from replay.models import Run
from replay.run import state


class Outcome(IntEnum):
    """Decision of the gate or of one criterion; the value is the process's exit code."""

    PASS = 0
    FAIL = 1
    INSUFFICIENT = 2
    INVALID = 3


@dataclass(frozen=True)
class Criterion:
    """One requirement: what was found, what is allowed, and what to do about it."""

    name: str
    outcome: Outcome
    value: str
    bound: str
    explanation: str


@dataclass(frozen=True)
class ClassResult:
    """A request class: its verdicts and the (display) interval of its harm rate."""

    class_key: str
    outcome: Outcome
    tally: Tally
    harm_rate: Interval
    explanation: str


def run_validity(run: Run) -> Criterion:
    """Only a run that kept its schedule and finished can be judged."""
    found = state(run)
    if found == "valid":
        explanation = "the replay kept its schedule"
    elif found == "running":
        explanation = "the replay has not ended: decide when it has"
    else:
        explanation = f"{run.reason or 'it did not finish'}: replay again"
    outcome = Outcome.PASS if found == "valid" else Outcome.INVALID
    return Criterion("valid run", outcome, found, "valid", explanation)


def noise(differing: int, pairs: int, policy: GatePolicy) -> Criterion:
    """A/A pairs that differ: too many, and a change cannot be told from noise."""
    bound = f"<= {percent(policy.max_noise)}"
    if pairs == 0:
        return Criterion(
            "A/A noise", Outcome.INVALID, "no A/A pairs", bound, "the run has no A/A pass"
        )
    value = f"{percent(differing / pairs)} ({differing} of {pairs})"
    if differing / pairs <= policy.max_noise:
        explanation = "the old build repeats itself"
        return Criterion("A/A noise", Outcome.PASS, value, bound, explanation)
    explanation = (
        "the old build does not repeat itself: make it deterministic (greedy sampling, "
        "batch-invariant mode) or raise max_noise"
    )
    return Criterion("A/A noise", Outcome.INVALID, value, bound, explanation)


def label_count(counts: Tally, requests: int, policy: GatePolicy) -> Criterion:
    """Enough diffs have a verdict. Where no answer changed, requests compared count instead."""
    by = f"by {policy.min_experts} or more experts" if policy.min_experts > 1 else "with a verdict"
    if counts.diffs == 0:
        enough = requests >= policy.min_labels
        return Criterion(
            "labels",
            Outcome.PASS if enough else Outcome.INSUFFICIENT,
            f"nothing to judge in {requests} requests",
            f">= {policy.min_labels} requests",
            "no answer changed" if enough else "replay more traffic",
        )
    value = f"{counts.judged} of {counts.diffs} diffs {by}"
    if counts.machine:
        value += f", {counts.machine} of them by machine"
    bound = f">= {policy.min_labels}"
    if counts.judged >= policy.min_labels:
        return Criterion("labels", Outcome.PASS, value, bound, "enough diffs are judged")
    missing = policy.min_labels - counts.judged
    explanation = f"{missing} more needed: {_where_from(missing, counts.open)}"
    return Criterion("labels", Outcome.INSUFFICIENT, value, bound, explanation)


def harm_rate(counts: Tally, policy: GatePolicy) -> Criterion:
    """The upper bound of the harm rate is low enough; disputed harm counts as harm in it.

    Fails when harm is certain: the lower bound lies above the limit, or every diff is judged and
    the rate in them does.
    """
    limit = policy.max_harm_rate
    bound = f"upper bound <= {percent(limit)} ({policy.interval}, {percent(policy.confidence)})"
    n = counts.judged
    if counts.diffs == 0:
        return Criterion("harm rate", Outcome.PASS, "no diffs", bound, "no answer changed")
    harm = counts.harm + counts.disputed_harm
    upper = policy.bounds(harm, n).upper
    lower = policy.bounds(counts.harm, n).lower
    value = f"{harm} of {n} harmful, at most {percent(upper)}" if n else "no labels"
    if counts.disputed_harm:
        value += f" (counting {counts.disputed_harm} disputed)"
    census = counts.open == 0 and counts.harm > limit * n
    if _certain(lower, limit) or census:
        known = "all diffs are judged" if census else f"at least {percent(lower)} are harmful"
        explanation = f"{known}: do not release"
        return Criterion("harm rate", Outcome.FAIL, value, bound, explanation)
    if upper <= limit:
        return Criterion("harm rate", Outcome.PASS, value, bound, "harm is rare enough")
    explanation = _evidence_missing(harm, counts, policy)
    return Criterion("harm rate", Outcome.INSUFFICIENT, value, bound, explanation)


def class_harm(classes: Sequence[ClassResult]) -> Criterion:
    """No single class may be known to be harmed, however good the average is."""
    harmed = [found.class_key for found in classes if found.outcome is Outcome.FAIL]
    return Criterion(
        "harm by class",
        Outcome.FAIL if harmed else Outcome.PASS,
        f"{len(harmed)} of {len(classes)} classes harmed",
        "0",
        f"harmed: {', '.join(harmed)}" if harmed else "no class is known to be harmed",
    )


def class_results(found: Sequence[Resolved], policy: GatePolicy) -> tuple[ClassResult, ...]:
    """Every class by name. The lower bounds together hold with the policy's confidence
    (Bonferroni over the classes that have verdicts)."""
    groups: dict[str, list[Resolved]] = defaultdict(list)
    for entry in found:
        groups[entry.class_key].append(entry)
    tallies = {key: tally(groups[key]) for key in sorted(groups)}
    judged = sum(counts.judged > 0 for counts in tallies.values())
    corrected = policy.model_copy(
        update={"confidence": 1 - (1 - policy.confidence) / max(judged, 1)}
    )
    return tuple(_class_result(key, counts, corrected) for key, counts in tallies.items())


def latency(ratios: Sequence[LatencyRatio], policy: GatePolicy) -> list[Criterion]:
    """Medians of TTFT and TPOT, new over old; empty when the policy does not bound them."""
    limit = policy.max_latency_ratio
    if limit is None:
        return []
    bound = f"<= {limit:.2f} x old"
    if not ratios:
        explanation = "the run recorded no latencies: replay again with streaming"
        return [Criterion("latency", Outcome.INSUFFICIENT, "not measured", bound, explanation)]
    return [_latency(found, limit, bound) for found in ratios]


def percent(share: float) -> str:
    """A share for people: three significant digits at most."""
    return f"{100 * share:.3g} %"


def _latency(found: LatencyRatio, limit: float, bound: str) -> Criterion:
    if found.ratio <= limit:
        outcome, explanation = Outcome.PASS, found.verdict
    elif found.verdict == "slower":
        outcome, explanation = Outcome.FAIL, "the new build is slower than A/A noise explains"
    else:
        outcome = Outcome.INSUFFICIENT
        explanation = f"{found.verdict} beyond A/A noise: replay more, on a quieter machine"
    return Criterion(
        f"median {found.metric.removesuffix('_ms').upper()}",
        outcome,
        f"{found.ratio:.2f} x ({found.old_ms:.3g} -> {found.new_ms:.3g} ms)",
        bound,
        explanation,
    )


def _certain(lower: float, limit: float) -> bool:
    """Whether harm is known to be over the limit: by more than rounding (one of one harmful is "at
    least 5 %" with 95 %, which is not over 5 %)."""
    return lower > limit and not math.isclose(lower, limit)


def _class_result(key: str, counts: Tally, policy: GatePolicy) -> ClassResult:
    n = counts.judged
    display = wilson(counts.harm, n, 0.95)
    if n == 0:
        return ClassResult(key, Outcome.INSUFFICIENT, counts, display, "no verdicts yet")
    lower = policy.bounds(counts.harm, n).lower
    upper = policy.bounds(counts.harm + counts.disputed_harm, n).upper
    shown = f"{counts.harm} of {n} harmful"
    if _certain(lower, policy.max_harm_rate):
        return ClassResult(
            key, Outcome.FAIL, counts, display, f"{shown}, at least {percent(lower)}"
        )
    outcome = Outcome.PASS if upper <= policy.max_harm_rate else Outcome.INSUFFICIENT
    return ClassResult(key, outcome, counts, display, f"{shown}, at most {percent(upper)}")


def _evidence_missing(harm: int, counts: Tally, policy: GatePolicy) -> str:
    needed = successes_free_needed(
        harm, counts.judged, policy.max_harm_rate, lambda c, n: policy.bounds(c, n).upper
    )
    if needed is None:
        return "no number of labels reaches this bound: raise max_harm_rate"
    plural = "label" if needed == 1 else "labels"
    return f"{needed} more harm-free {plural} needed: {_where_from(needed, counts.open)}"


def _where_from(needed: int, left: int) -> str:
    if needed <= left:
        return f"{left} diffs are still unjudged (`inferloop label next`)"
    return f"the run has {left} unjudged diffs left, so replay more traffic"
