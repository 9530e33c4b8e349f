"""The gate's policy file (TOML, table `[gate]`): what a release must show."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evaluation.errors import GateError
from evaluation.judgements import PANEL
from evaluation.statistics import Interval, beta_mixture, exact_lower, exact_upper


class GatePolicy(BaseModel):
    """Bounds of the gate. Every key is optional; an unknown one or a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_harm_rate: float = Field(
        default=0.05, gt=0, lt=1, description="bound on the upper limit of the share of -1 verdicts"
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    interval: Literal["exact", "anytime"] = Field(
        default="exact", description="exact: look once; anytime: may be looked at after every label"
    )
    min_labels: int = Field(default=30, ge=1, description="diffs with a verdict")
    min_experts: int = Field(
        default=1,
        ge=1,
        le=PANEL,
        description="votes before a diff has a verdict; more than a panel are never asked",
    )
    max_latency_ratio: float | None = Field(
        default=1.2, gt=0, description="new / old median of TTFT and of TPOT; inf: not bounded"
    )
    max_noise: float = Field(
        default=0.1, ge=0, le=1, description="share of A/A pairs that may differ in a valid run"
    )
    accept_machine: bool = Field(
        default=False, description="a machine's label counts where experts gave no verdict"
    )

    @field_validator("max_latency_ratio")
    @classmethod
    def _unbounded(cls, value: float | None) -> float | None:
        """TOML has no null, and JSON (the report) no infinity."""
        return None if value == math.inf else value

    @classmethod
    def load(cls, path: Path) -> GatePolicy:
        """Read a policy file. Raises GateError naming the file and the key that is wrong."""
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise GateError(f"cannot read the gate policy {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise GateError(f"the gate policy {path} is not TOML: {error}") from error
        if set(raw) != {"gate"} or not isinstance(raw["gate"], dict):
            raise GateError(f"the gate policy {path} must have exactly one table, [gate]")
        try:
            return cls.model_validate(raw["gate"])
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            problem = f"{key} = {first['input']!r}: {first['msg']}"
            if first["type"] == "extra_forbidden":
                problem = f"unknown key {key}; known are {', '.join(cls.model_fields)}"
            raise GateError(f"the gate policy {path}: {problem}") from error

    def bounds(self, successes: int, n: int) -> Interval:
        """Lower and upper bound of a share, each holding with at least `confidence`."""
        if self.interval == "anytime":
            return beta_mixture(successes, n, self.confidence)
        return Interval(
            exact_lower(successes, n, self.confidence), exact_upper(successes, n, self.confidence)
        )
