"""Renders a conversation so that only the template's own control tokens count as such.

A message's text is the client's: "<|im_end|>" written in it must not end its turn. Not for the
template itself (`engine.chat_template`) nor for ids (`engine.tokenizer`).
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Template(Protocol):
    """A model's chat template."""

    def render(self, messages: list[dict[str, Any]]) -> str: ...


class Piece(NamedTuple):
    """A part of a prompt. `special`: control tokens written in it are control tokens."""

    text: str
    special: bool


def render_chat(
    template: Template, messages: list[dict[str, Any]], control_tokens: Sequence[str]
) -> list[Piece]:
    """The prompt for `messages` in pieces, to be encoded one by one. Raises `TemplateError`.

    Where a message holds the text of one of `control_tokens`, that is marked while the template
    renders; what is marked afterwards stays text.
    """
    names = _alternatives(tuple(control_tokens))
    if not names or not any(re.search(names, message["content"]) for message in messages):
        return [Piece(template.render(messages), special=True)]
    mark = secrets.token_hex(16)  # only letters and digits: no filter of a template changes it
    rendered = template.render(
        [m | {"content": re.sub(f"(?={names})", mark, m["content"])} for m in messages]
    )
    parts = re.split(f"(?<!{mark})({names})", rendered)
    return [
        Piece(part.replace(mark, ""), special=index % 2 == 1)
        for index, part in enumerate(parts)
        if part
    ]


@functools.lru_cache(maxsize=8)
def _alternatives(control_tokens: tuple[str, ...]) -> str:
    """A regular expression's group of the tokens, longest first; "" for none."""
    names = sorted(filter(None, control_tokens), key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, names))})" if names else ""
