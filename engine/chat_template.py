"""Renders chat messages to a prompt with the model's own Jinja template, sandboxed.

The template comes from the model file, so it is foreign code: it runs without attribute access to
Python objects and cannot change its input. Not for tokenizing: the result is encoded by
`engine.tokenizer` with control tokens recognised.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NoReturn

import xxhash
from jinja2 import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import TemplateError
from engine.gguf import GGUFFile

MAX_TEMPLATE_CHARS = 100_000


class ChatTemplate:
    """The chat template of one model file; `fingerprint` is hex over its source."""

    def __init__(self, source: str | None, *, bos: str = "", eos: str = "") -> None:
        self._source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template = None if source is None else _compile(source)
        self.fingerprint = xxhash.xxh3_128_hexdigest((source or "").encode())

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ChatTemplate:
        """The template in the file's metadata; rendering fails when the file has none."""
        tokens = file.metadata.get("tokenizer.ggml.tokens", [])

        def token(key: str) -> str:
            index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
            return tokens[index] if index is not None and 0 <= index < len(tokens) else ""

        source = file.metadata.get("tokenizer.chat_template")
        return cls(source, bos=token("bos"), eos=token("eos"))

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for `messages`, ending where the assistant's answer begins.

        Raises TemplateError when the model has no template or the template refuses.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template: use /v1/completions instead")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokens
            )
        except (JinjaError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateError(f"the model's chat template failed: {error}") from error


def _compile(source: str) -> Any:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(
            f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}"
        )
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    try:
        return environment.from_string(source)
    except JinjaError as error:
        raise TemplateError(f"the model's chat template does not compile: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)
