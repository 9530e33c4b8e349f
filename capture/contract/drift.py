"""Whether traffic is distributed like a baseline: lengths, languages, tenants, parameters.

Numbers are compared by the two-sample Kolmogorov-Smirnov test, categories by Pearson's
chi-square test of homogeneity, all p-values corrected together by Holm's method. With enough
records every difference is significant, so a drift also needs a size that matters.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from capture.contract.language import language_of
from capture.contract.shown import printable

Record = dict[str, Any]
Verdict = Literal["drift", "same", "too few"]

SAMPLE = 20_000
LANGUAGE_SAMPLE = 2_000
MIN_RECORDS = 20
MIN_EXPECTED = 5.0
LONGEST_NAME = 40
LARGEST = sys.float_info.max
"""JSON knows larger integers; they are no lengths."""


@dataclass(slots=True)
class Profile:
    """What of a set of records is compared: values by feature, at most 20,000 of each.

    Beyond that every n-th record is kept, n doubling as the file grows, so that the whole file
    is covered evenly.
    """

    records: int = 0
    numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    categories: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _stride: int = 1
    _kept: int = 0
    _languages: int = 0

    def add(self, record: Record) -> None:
        """Take a valid record in."""
        self.records += 1
        self._add_categories(record)
        if (self.records - 1) % self._stride:
            return
        for name, value in _numbers(record).items():
            if value is not None and abs(value) <= LARGEST:
                self.numbers[name].append(float(value))
        self._kept += 1
        if self._kept >= SAMPLE:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        self._kept //= 2
        for name, values in self.numbers.items():
            self.numbers[name] = values[::2]

    def _add_categories(self, record: Record) -> None:
        for name, value in _categories(record).items():
            self.categories[name][value] += 1
        if self._languages < LANGUAGE_SAMPLE and (text := _text(record)):
            self._languages += 1
            self.categories["language"][language_of(text)] += 1


def _numbers(record: Record) -> dict[str, float | None]:
    usage, sampling = record.get("usage") or {}, record["sampling"]
    text = _text(record)
    return {
        "prompt tokens": usage.get("prompt_tokens"),
        "output tokens": usage.get("completion_tokens"),
        "prompt characters": len(text) if text else None,
        "messages": len(record["messages"]) if record.get("messages") else None,
        "max_tokens": sampling["max_tokens"],
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "top_k": sampling.get("top_k", 0),
        "priority": record.get("priority", 50),
    }


def _categories(record: Record) -> dict[str, str]:
    status = int(record.get("status", 200))
    return {
        "tenant": record["tenant"],
        "route": record["route"],
        "class": record["class_key"],
        "model": record["model"],
        "endpoint": record["endpoint"],
        "stream": "yes" if record.get("stream") else "no",
        "finish reason": record.get("finish_reason") or record.get("error_type") or "none",
        "status": f"{status // 100}xx",
        "seeded": "yes" if record["sampling"].get("seed") is not None else "no",
    }


def _text(record: Record) -> str:
    """What the user wrote last: the prompt, or the content of the last message."""
    if record.get("messages"):
        content = record["messages"][-1].get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            return " ".join(part for part in parts if isinstance(part, str))
        return content if isinstance(content, str) else ""
    prompt = record.get("prompt")
    return prompt if isinstance(prompt, str) else ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One feature in both sets.

    `size`: KS distance D (0-1) or Cramer's V (0-1); `p` after Holm's correction; `verdict`: drift,
    same, or too few (fewer than 20 values on a side: not tested, `p` is NaN).
    """

    feature: str
    test: Literal["KS", "chi-square"]
    size: float
    p: float
    verdict: Verdict
    detail: str


def compare_profiles(
    new: Profile, baseline: Profile, *, alpha: float = 0.01, min_size: float = 0.1
) -> list[Comparison]:
    """Every feature of either set, drifts first, the larger the earlier.

    A drift has p < `alpha` after the correction over all tests and a size of at least `min_size`.
    """
    found = [
        *(_numeric(name, new, baseline) for name in _names(new.numbers, baseline.numbers)),
        *(_category(name, new, baseline) for name in _names(new.categories, baseline.categories)),
    ]
    tested = [item for item in found if not math.isnan(item[3])]
    corrected = dict(zip((item[0] for item in tested), holm([i[3] for i in tested]), strict=True))
    comparisons = []
    for name, test, size, p, detail in found:
        adjusted = corrected.get(name, math.nan)
        drifted = adjusted < alpha and size >= min_size
        verdict: Verdict = "too few" if math.isnan(p) else "drift" if drifted else "same"
        comparisons.append(Comparison(name, test, size, adjusted, verdict, detail))
    order = {"drift": 0, "same": 1, "too few": 2}
    return sorted(comparisons, key=lambda item: (order[item.verdict], -item.size))


def holm(p_values: list[float]) -> list[float]:
    """P-values corrected for testing many at once: Holm (1979), step-down, family-wise error."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


Found = tuple[str, Literal["KS", "chi-square"], float, float, str]


def _names(new: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys([*new, *baseline]))


def _numeric(name: str, new: Profile, baseline: Profile) -> Found:
    from scipy.stats import ks_2samp

    values, before = new.numbers.get(name, []), baseline.numbers.get(name, [])
    detail = f"median {_median(before)} -> {_median(values)}"
    if min(len(values), len(before)) < MIN_RECORDS:
        return name, "KS", 0.0, math.nan, f"{len(before)} and {len(values)} values"
    result = ks_2samp(values, before, method="asymp")
    return name, "KS", float(result.statistic), float(result.pvalue), detail


def _median(values: list[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:g}"


def _category(name: str, new: Profile, baseline: Profile) -> Found:
    from scipy.stats import chi2_contingency

    values, before = new.categories.get(name, Counter()), baseline.categories.get(name, Counter())
    total, total_before = values.total(), before.total()
    if min(total, total_before) < MIN_RECORDS:
        return name, "chi-square", 0.0, math.nan, f"{total_before} and {total} values"
    table = _table(values, before)
    if len(table[0]) < 2:
        only = f"always {_shown(next(iter(values)))}" if len(values | before) == 1 else "all rare"
        return name, "chi-square", 0.0, 1.0, only
    result = chi2_contingency(table, correction=False)
    size = math.sqrt(float(result.statistic) / (total + total_before))
    return name, "chi-square", size, float(result.pvalue), _largest_shift(values, before)


def _table(values: Counter[str], before: Counter[str]) -> list[list[int]]:
    """Counts of both sets; categories expected fewer than five times on a side are put together."""
    total, total_before = values.total(), before.total()
    share = min(total, total_before) / (total + total_before)
    columns: list[tuple[int, int]] = []
    rest = (0, 0)
    for name in {**values, **before}:
        pair = (values[name], before[name])
        if sum(pair) * share >= MIN_EXPECTED:
            columns.append(pair)
        else:
            rest = (rest[0] + pair[0], rest[1] + pair[1])
    if sum(rest):
        columns.append(rest)
    return [list(row) for row in zip(*columns, strict=True)]


def _largest_shift(values: Counter[str], before: Counter[str]) -> str:
    total, total_before = values.total(), before.total()
    shifts = {name: values[name] / total - before[name] / total_before for name in values | before}
    name = max(shifts, key=lambda key: abs(shifts[key]))
    shown = [f"{counts[name] / counts.total():.1%}" for counts in (before, values)]
    return f"{_shown(name)} {shown[0]} -> {shown[1]}"


def _shown(value: str) -> str:
    return printable(value)[:LONGEST_NAME]
