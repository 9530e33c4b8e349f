"""The bodies of OpenAI's completions and chat completions, as far as they are honoured.

Every field is honoured or refused by name: a field this server does not implement is accepted only
at the value that changes nothing. Not for answers: those are `engine.replies`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.errors import RequestError

MAX_ALTERNATIVES = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 128
MAX_MESSAGES = 4096
MAX_TOP_K = 2**31 - 1
MAX_SHOWN = 80

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
"""Fields that are not implemented, with the values (besides null) that ask for nothing."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, not {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "the text holds half of a surrogate pair, which is no character"
        ) from error
    return value


def _prompt(value: object) -> str | list[int]:
    """One prompt: text or token ids, possibly as the only element of a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], str | list):
        raise ValueError(f"{len(value)} prompts in one request: send one request for each")
    raise ValueError("expected text or a list of token ids")


def _stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings, the limit is {MAX_STOPS}")
    for stop in stops:
        if not _text(stop):
            raise ValueError("an empty stop string would stop every answer at once")
        if len(stop) > MAX_STOP_CHARS:
            raise ValueError(
                f"a stop string has {len(stop)} characters, the limit is {MAX_STOP_CHARS}"
            )
    return stops


def _content(value: object) -> str:
    """A message's text; OpenAI's list of text parts is joined."""
    if isinstance(value, list):
        parts = []
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(
                    f"a content part of type {_shown(kind)}: this model reads text only"
                )
            if unknown := part.keys() - {"type", "text"}:
                raise ValueError(f"a content part has the unknown field {_shown(min(unknown))}")
            parts.append(_text(part.get("text")))
        return "".join(parts)
    return _text(value)


Text = Annotated[str, BeforeValidator(_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: object) -> object:
        """Stop at the first unknown field: a body can hold a million of them."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise PydanticCustomError("unknown_field", "unknown", {"name": _cut(name)})
        return value


class StreamOptions(_Strict):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Generation(_Strict):
    """Fields that both endpoints share. None: the server's default."""

    model: Text
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    stop_token_ids: list[int] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    return_token_ids: bool | None = None
    user: Text | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def conflicts(self) -> None:
        """Raises `RequestError` for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs cannot be streamed: leave stream out", param="prompt_logprobs"
            )


class CompletionBody(_Generation):
    """POST /v1/completions.

    Both bodies answer what the endpoints spell differently: `output_limit`, the most tokens to
    generate (None: the client left it open), and `alternatives`, how many are wanted at each output
    position (None: no log-probabilities).
    """

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(_Strict):
    """One message of a conversation. The fields after `content` are those that clients send back
    with an earlier answer; they are accepted when they say nothing."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None


class ChatBody(_Generation):
    """POST /v1/chat/completions; see `CompletionBody`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def system_prompt(self) -> str | None:
        """The text of the first system message."""
        return next((m.content for m in self.messages if m.role == "system"), None)

    def conflicts(self) -> None:
        super().conflicts()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                f"max_tokens {self.max_tokens} and max_completion_tokens "
                f"{self.max_completion_tokens} differ: send one of them",
                param="max_completion_tokens",
            )


Body = TypeVar("Body", CompletionBody, ChatBody)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Read a request body. Raises `RequestError` (400) naming the field, its value and what is
    allowed; nothing is coerced or ignored."""
    raw = _load(data)
    _refuse_unimplemented(raw)
    try:
        body = kind.model_validate(raw)
    except ValidationError as error:
        raise _first_error(error, raw) from error
    body.conflicts()
    return body


def _load(data: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise RequestError(f"the body is {_shown(raw)}: expected a JSON object")
    return raw


def _refuse_unimplemented(raw: dict[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        value = raw.pop(name, None)
        if value is not None and not any(_same(value, ok) for ok in neutral):
            allowed = " or ".join(json.dumps(ok) for ok in neutral)
            raise RequestError(
                f"{name} is {_shown(value)}: this server supports only {allowed}; leave it out",
                param=name,
            )


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _first_error(error: ValidationError, raw: dict[str, Any]) -> RequestError:
    """The first problem pydantic found, in words that name field, value and limit."""
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"] if not str(part).startswith("function-")]
    name = ".".join(place)
    if problem["type"] == "unknown_field":
        name = ".".join([*place, problem["ctx"]["name"]])
        message = f"unknown field {name!r}: remove it, or check its spelling"
    elif problem["type"] == "missing":
        message = f"{name} is missing"
    else:
        text = problem["msg"].removeprefix("Value error, ")
        message = f"{name} is {_shown(problem['input'])}: {text[0].lower()}{text[1:]}"
    return RequestError(message, param=name)


def _shown(value: object) -> str:
    """A value for a message, cut to a readable length."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return _cut(repr(value))


def _cut(text: str) -> str:
    """Text at a readable length, and without what UTF-8 cannot hold."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
