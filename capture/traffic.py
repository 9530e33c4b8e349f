"""One line of captured traffic, `inferloop.traffic/1`: what a request asked and what it got.

The engine's server, the capture proxy and the replay all speak this type; a traffic file is one
JSON object a line. Not for writing files: that is `capture.mirror`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

CONTENT: dict[str, Any] = {"x-pii": "content"}
"""What a person wrote or was answered. Redaction finds patterns, so it may still name people."""
TEXT: dict[str, Any] = CONTENT | {"x-limit": "1 MiB by default; cut beyond, `truncated` says so"}
PSEUDONYM: dict[str, Any] = {"x-pii": "pseudonym"}
IDENTIFIER: dict[str, Any] = {"x-pii": "identifier"}
MS: dict[str, Any] = {"x-unit": "ms"}
TOKENS: dict[str, Any] = {"x-unit": "tokens"}
NATS: dict[str, Any] = {"x-unit": "nats"}
BYTES: dict[str, Any] = {"x-unit": "bytes"}

SCHEMA: Literal["inferloop.traffic/1"] = "inferloop.traffic/1"


class Sampling(BaseModel):
    """Sampling parameters as resolved by the server, defaults filled in."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int = Field(ge=1, json_schema_extra=TOKENS)
    temperature: float = Field(ge=0, allow_inf_nan=False)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: no limit")
    seed: int | None = None
    stop: list[str] = Field(default=[], json_schema_extra=CONTENT)
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class Chunk(BaseModel):
    """One streamed piece: when it left (ms after arrival) and how many tokens it carried."""

    model_config = ConfigDict(extra="forbid")

    at_ms: FiniteFloat = Field(json_schema_extra=MS)
    tokens: int = Field(json_schema_extra=TOKENS)


class TopAlternatives(BaseModel):
    """Alternatives at a low-margin output position, likely first."""

    model_config = ConfigDict(extra="forbid")

    position: int = Field(ge=0, description="index in the output")
    token_ids: list[int] = Field(json_schema_extra=CONTENT)
    logprobs: list[FiniteFloat] = Field(json_schema_extra=NATS)


class Usage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt_tokens: int = Field(ge=0, json_schema_extra=TOKENS)
    completion_tokens: int = Field(ge=0, json_schema_extra=TOKENS)
    cached_tokens: int = Field(default=0, ge=0, json_schema_extra=TOKENS)


class TrafficRecord(BaseModel):
    """A finished, failed or cancelled request.

    `messages` holds a chat request, `prompt` a text completion, `rendered_prompt` and
    `prompt_token_ids` either of them as the engine saw it. `sampling_set` names the parameters that
    the client set itself, so that a replay leaves the others to the build's defaults (None: not
    known, all are sent). Content that was dropped (redaction failed) is None and `dropped` says
    why. `redactions` counts placeholders by kind, and fields left out because they would reveal
    what one hides.
    """

    model_config = ConfigDict(extra="forbid")

    schema_: Literal["inferloop.traffic/1"] = Field(default=SCHEMA, alias="schema")
    request_id: str = Field(pattern=r"^[0-9a-f]{32}$", description="W3C trace id")
    conversation_id: str = Field(
        description="the client's, or `opening-...` by the first message, or the request's",
        json_schema_extra=IDENTIFIER,
    )
    arrival: str = Field(
        description="UTC, ISO 8601 with microseconds", json_schema_extra={"format": "date-time"}
    )
    arrival_ns: int = Field(
        ge=-(2**63),
        lt=2**63,
        description="the engine host's monotonic clock",
        json_schema_extra={"x-unit": "ns"},
    )
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    stream: bool = False
    tenant: str = Field(json_schema_extra=IDENTIFIER)
    route: str
    class_key: str
    priority: int = Field(default=50, ge=0, le=100)
    model: str
    messages: list[dict[str, Any]] | None = Field(default=None, json_schema_extra=TEXT)
    prompt: str | None = Field(default=None, json_schema_extra=TEXT)
    prompt_token_ids: list[int] | None = Field(default=None, json_schema_extra=CONTENT)
    rendered_prompt: str | None = Field(default=None, json_schema_extra=TEXT)
    sampling: Sampling
    sampling_set: list[str] | None = None
    output_text: str | None = Field(default=None, json_schema_extra=TEXT)
    output_token_ids: list[int] | None = Field(default=None, json_schema_extra=CONTENT)
    logprobs: list[float | None] | None = Field(default=None, json_schema_extra=NATS)
    margins: list[float | None] | None = Field(default=None, json_schema_extra=NATS)
    top: list[TopAlternatives] = []
    status: int = 200
    finish_reason: str | None = None
    error_type: str | None = None
    usage: Usage | None = None
    tokens_counted_by: Literal["usage", "token_ids", "chunks"] | None = Field(
        default=None, description="by the proxy: chunks may carry several tokens each"
    )
    queue_ms: float | None = Field(default=None, json_schema_extra=MS)
    ttft_ms: float | None = Field(default=None, json_schema_extra=MS)
    duration_ms: float | None = Field(default=None, json_schema_extra=MS)
    chunks: list[Chunk] = []
    fingerprint: str | None = None
    client: str | None = Field(
        default=None,
        description="address; a keyed pseudonym once written",
        json_schema_extra=PSEUDONYM,
    )
    client_key_id: str | None = None
    headers: dict[str, str] = Field(default={}, json_schema_extra=IDENTIFIER)
    original_bytes: int | None = Field(
        default=None, description="size of the body before truncation", json_schema_extra=BYTES
    )
    truncated: bool = False
    redactions: dict[str, int] = {}
    dropped: str | None = None

    @field_validator("arrival")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        datetime.fromisoformat(value)
        return value
