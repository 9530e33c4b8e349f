"""Where inferloop keeps its data and the few knobs every command shares.

One object, read from the environment (`INFERLOOP_*`), then from `inferloop.toml` in the working
directory (or the file named by `INFERLOOP_CONFIG`), then the defaults. Secrets come from the
environment only. Not for options of a single command: those are its flags.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from capture.errors import SettingsError

SHARED_MEMORY = Path("/dev/shm")


class Settings(BaseSettings):
    """Paths, sizes and connection strings shared by all commands."""

    model_config = SettingsConfigDict(env_prefix="INFERLOOP_", extra="forbid")

    home: Path = Path(".inferloop")
    ring_dir: Path | None = Field(default=None, description="default: in /dev/shm, named by home")
    ring_mib: int = Field(default=128, ge=1, le=65536)
    lake_catalog: str | None = Field(default=None, description="SQLite file, or postgresql:// URL")
    lake_data: str | None = Field(default=None, description="directory of the lake's Parquet files")
    database_url: str | None = Field(
        default=None, description="SQLAlchemy URL of the relational database"
    )
    retention_days: int | None = Field(
        default=None, ge=1, le=36500, description="whole days of rows the lake keeps"
    )
    lake_max_gib: float | None = Field(
        default=None,
        ge=0.01,
        allow_inf_nan=False,
        description="what the lake may take on disk, GiB",
    )
    collector_metrics_port: int | None = Field(default=None, ge=1, le=65535)
    collector_metrics_host: str = "127.0.0.1"
    gpu_devices: str | None = Field(
        default=None, description="devices to watch, as CUDA_VISIBLE_DEVICES; default: that, or all"
    )
    mirror_share: float = Field(default=0.01, ge=0.0, le=1.0)
    mirror_body_kib: int = Field(
        default=1024, ge=1, le=1 << 20, description="text of a request or answer kept, KiB"
    )
    mirror_rotate_mib: float = Field(default=64, ge=0.001, le=65536, allow_inf_nan=False)
    mirror_rotate_seconds: float = Field(default=3600, ge=0.1, le=31_536_000, allow_inf_nan=False)
    mirror_fsync: Literal["always", "second", "rotate"] = "second"
    mirror_compress: bool = True
    mirror_max_gib: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="what all traffic may take, GiB"
    )
    mirror_key: SecretStr | None = Field(default=None, description="key of sampling and pseudonyms")

    def __init__(self, **values: Any) -> None:
        """Raises SettingsError naming the setting, its value and what is wrong with it."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError("; ".join(map(_problem, error.errors()))) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise SettingsError(f"cannot read the settings file {_toml_file()}: {error}") from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls, toml_file=_toml_file())
        return init_settings, env_settings, _WithoutSecrets(settings_cls, toml)

    @property
    def rings(self) -> Path:
        """Directory of the engines' ring files: shared memory where there is any."""
        if self.ring_dir is not None:
            return self.ring_dir
        if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
            name = hashlib.blake2s(str(self.home.resolve()).encode(), digest_size=6).hexdigest()
            return SHARED_MEMORY / f"inferloop-{name}"
        return self.home / "rings"

    @property
    def lake(self) -> Path:
        return self.home / "lake"

    @property
    def traffic(self) -> Path:
        return self.home / "traffic"

    @property
    def runs(self) -> Path:
        return self.home / "runs"

    @property
    def policy_file(self) -> Path:
        return self.home / "policy" / "policy.json"

    @property
    def database(self) -> str:
        """SQLAlchemy URL of the relational database."""
        return self.database_url or f"sqlite:///{self.home.resolve() / 'inferloop.sqlite'}"


class _WithoutSecrets(PydanticBaseSettingsSource):
    """The TOML file's values; refuses secrets, which a file would leak into version control."""

    def __init__(self, settings_cls: type[BaseSettings], toml: TomlConfigSettingsSource) -> None:
        super().__init__(settings_cls)
        self._toml = toml

    def get_field_value(self, field: object, field_name: str) -> tuple[object, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, object]:
        values = self._toml()
        if "mirror_key" in values:
            raise SettingsError(
                "mirror_key must not stand in a settings file: set INFERLOOP_MIRROR_KEY instead"
            )
        return values


def _toml_file() -> Path:
    """The settings file; a default one need not exist, one that was named must."""
    named = os.environ.get("INFERLOOP_CONFIG")
    if named is not None and not Path(named).is_file():
        raise SettingsError(f"there is no settings file {named} (INFERLOOP_CONFIG)")
    return Path(named or "inferloop.toml")


def _problem(error: ErrorDetails) -> str:
    name = "_".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"there is no setting {name}; there are {', '.join(Settings.model_fields)}"
    shown = "" if name == "mirror_key" else f" is {error['input']!r}"
    return f"setting {name} (INFERLOOP_{name.upper()}){shown}: {error['msg']}"
