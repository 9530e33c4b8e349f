"""A request's JSON body as the traffic record needs it.

Tolerant: what is odd is left out, never refused, and a body that was cut is read as far as it
goes. Not for headers (`capture.proxy.caller`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pydantic_core
import xxhash

from capture.proxy.token_list import PLACEHOLDER, TokenText, spared

STOPS_KEPT = 64
LARGEST_COUNT = 1 << 31


@dataclass(frozen=True, slots=True)
class Question:
    """`sampling` holds what the client set and is valid, by the names of `traffic.Sampling`;
    `unsupported` says why it fits in no traffic record, "" when it does."""

    model: str = ""
    stream: bool = False
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | TokenText | None = None
    system_prompt: str | None = None
    choices: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    unsupported: str = ""

    @property
    def template(self) -> str:
        """The third part of a class key: which system prompt, "-" for none."""
        text = self.system_prompt
        data = text.encode("utf-8", "surrogatepass") if text else b""
        return xxhash.xxh3_64_hexdigest(data)[:8] if data else "-"


def read_question(body: bytes, *, chat: bool, cut: bool) -> Question:
    """Read a request body; `cut`: its end is missing, and all of it where there was no room."""
    if cut and not body:
        return Question(unsupported="overflow")
    body, ids = (body, None) if chat else spared(body, b"prompt")
    try:
        fields = pydantic_core.from_json(body, allow_partial="trailing-strings" if cut else False)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return Question(unsupported="not_json")
    model, count = fields.get("model"), fields.get("n")
    common: dict[str, Any] = {
        "model": model if isinstance(model, str) else "",
        "stream": fields.get("stream") is True,
        "choices": count if _is_integer(count, 1) else 1,
        "sampling": _sampling(fields),
    }
    return Question(**common, **(_messages(fields) if chat else _prompt(fields, ids)))


def _messages(fields: dict[str, Any]) -> dict[str, Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return {"unsupported": "no_messages"}
    system = next((m.get("content") for m in messages if m.get("role") == "system"), None)
    return {"messages": messages, "system_prompt": system if isinstance(system, str) else None}


def _prompt(fields: dict[str, Any], ids: TokenText | None) -> dict[str, Any]:
    """`ids`: what a placeholder stands for."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if ids is not None and prompt == [PLACEHOLDER]:
        return {"prompt_token_ids": ids}
    if isinstance(prompt, list) and prompt and _are_token_ids(prompt):
        return {"prompt_token_ids": prompt}
    return {"unsupported": "several_prompts" if isinstance(prompt, list) else "no_prompt"}


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """What the client set, where it is what a traffic record takes."""
    found: dict[str, Any] = {}
    for name in ("max_completion_tokens", "max_tokens"):
        if _is_integer(fields.get(name), 1) and fields[name] < LARGEST_COUNT:
            found.setdefault("max_tokens", fields[name])
    if _is_number(fields.get("temperature"), 0.0, math.inf):
        found["temperature"] = fields["temperature"]
    if _is_number(fields.get("top_p"), 0.0, 1.0) and fields["top_p"] > 0:
        found["top_p"] = fields["top_p"]
    if _is_integer(fields.get("top_k"), -1):
        found["top_k"] = max(0, fields["top_k"])
    if _is_integer(fields.get("seed"), -(1 << 63)):
        found["seed"] = fields["seed"]
    if isinstance(fields.get("ignore_eos"), bool):
        found["ignore_eos"] = fields["ignore_eos"]
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and stops and all(isinstance(item, str) for item in stops):
        found["stop"] = stops[:STOPS_KEPT]
    ids = fields.get("stop_token_ids")
    if isinstance(ids, list) and ids and _are_token_ids(ids):
        found["stop_token_ids"] = ids[:STOPS_KEPT]
    return found


def _are_token_ids(items: list[Any]) -> bool:
    """Without a loop of Python's: a prompt may be half a million of them."""
    return set(map(type, items)) == {int} and min(items) >= 0 and max(items) < 1 << 63


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def _is_number(value: object, least: float, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return least <= value <= most and math.isfinite(value)
