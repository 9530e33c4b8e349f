"""Cuts the content of a traffic record to a size, without leaving half a secret at the cut."""

from __future__ import annotations

import re
from typing import Any

from capture.mirroring.personal_numbers import NUMBER_SEPARATORS

REQUEST_TEXTS = ("messages", "prompt", "rendered_prompt")
CUT_TAIL_CHARS = 512
"""How far back a cut looks for white space: half an address or key must not stay at the end."""

_NUMBER_TAIL = re.compile(rf"[\d+\s{NUMBER_SEPARATORS}]*\Z")


def approximate_bytes(record: dict[str, Any]) -> int:
    """About how much memory a record's content takes; cheap, not exact."""
    size = sum(_text_length(record.get(key)) for key in (*REQUEST_TEXTS, "output_text"))
    for key in ("prompt_token_ids", "output_token_ids", "logprobs", "margins", "chunks"):
        size += 8 * len(record.get(key) or ())
    return size


def truncate_record(record: dict[str, Any], limit: int) -> dict[str, Any]:
    """A copy of `record` whose request text and answer take at most `limit` bytes of UTF-8 each.

    Marked `truncated`, with `original_bytes` set, when something was cut; token ids of a text
    that was cut are left out.
    """
    clean = dict(record)
    cut: set[str] = set()
    for key in (*REQUEST_TEXTS, "output_text"):
        budget = _Budget(limit)
        value = budget.cut(record.get(key))
        if budget.exceeded:
            clean[key] = value
            cut.add(key)
    if not cut:
        return clean
    if cut & set(REQUEST_TEXTS):
        clean.pop("prompt_token_ids", None)
    if "output_text" in cut:
        clean.pop("output_token_ids", None)
        clean.pop("top", None)
    if clean.get("original_bytes") is None:
        texts = (record.get("messages"), record.get("prompt"), record.get("output_text"))
        clean["original_bytes"] = sum(_byte_length(text) for text in texts)
    return clean | {"truncated": True}


class _Budget:
    """Bytes left for the strings of one JSON value, spent in reading order."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self.exceeded = False

    def cut(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._cut_text(value)
        if isinstance(value, dict):
            return {key: self.cut(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.cut(item) for item in value]
        return value

    def _cut_text(self, text: str) -> str:
        size = _byte_length(text)
        if size <= self._left:
            self._left -= size
            return text
        self.exceeded = True
        data = text.encode("utf-8", "surrogatepass")[: self._left]
        self._left = 0
        return _trim(data.decode("utf-8", "ignore"))


def _trim(text: str) -> str:
    """`text` without its last, perhaps incomplete, word and without a number before it."""
    tail = text[-CUT_TAIL_CHARS:]
    kept = re.sub(r"\S+\Z", "", tail)
    text = text[: len(text) - len(tail)] + kept
    match = _NUMBER_TAIL.search(text, max(0, len(text) - CUT_TAIL_CHARS))
    return text if match is None else text[: match.start()]


def _byte_length(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(_byte_length(item) for item in value.values())
    if isinstance(value, list):
        return sum(_byte_length(item) for item in value)
    return 0


def _text_length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_text_length(item) for item in value.values())
    if isinstance(value, list):
        return sum(_text_length(item) for item in value)
    return 0
