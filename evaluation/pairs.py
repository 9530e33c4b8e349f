"""What a judge gets to see of a diff: the question and two answers without names.

Everything a client receives of a presentation is a `Pair`; nothing else may be sent to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evaluation.models import Presentation
from replay.models import Diff, ReplayedRequest


@dataclass(frozen=True)
class Answer:
    """One side of a pair: its text, or what happened instead of one."""

    text: str
    note: str | None


@dataclass(frozen=True)
class Pair:
    """What a client may see of a presentation. `question` is (role, text) in order."""

    token: str
    question: tuple[tuple[str, str], ...]
    left: Answer
    right: Answer


def pair_of(presentation: Presentation) -> Pair:
    """The pair as that presentation shows it, with nothing in it that tells the builds apart."""
    diff = presentation.diff
    old, new = _answer(diff.left), _answer(diff.right)
    left, right = (new, old) if presentation.new_side == "left" else (old, new)
    return Pair(presentation.token, question_of(diff), left, right)


def _answer(request: ReplayedRequest) -> Answer:
    if request.error is not None:
        return Answer(request.output_text or "", f"failed with status {request.status}")
    if request.finish_reason == "length":
        return Answer(request.output_text or "", "cut off at the token limit")
    return Answer(request.output_text or "", None)


def question_of(diff: Diff) -> tuple[tuple[str, str], ...]:
    """What was asked, as (role, text); the rendered prompt when the input was not kept."""
    messages = diff.input.get("messages")
    if isinstance(messages, list):
        return tuple((str(m.get("role", "user")), _content(m.get("content"))) for m in messages)
    prompt = diff.input.get("prompt")
    if isinstance(prompt, str):
        return (("prompt", prompt),)
    return (("prompt", diff.left.rendered_prompt or "(the prompt was not kept)"),)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
