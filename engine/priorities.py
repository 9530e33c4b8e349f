"""The feedback policy: which request classes the experts' scores demote, and how it is reloaded.

The evaluation side writes the file, the engine polls it; both use these types. No torch, no
scheduler: what an adjustment does to the order of service is `engine.scheduler`'s business.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from engine.errors import EngineError

SCHEMA = "inferloop.policy/1"
MAX_EFFECT_LIMIT = 100
MAX_POLICY_BYTES = 4 << 20
MAX_ID_CHARS = 128

Direction = Literal["demote_harmed"]
Basis = Literal["expert", "machine", "operator"]


class PolicyError(EngineError):
    """A policy (file) is not valid; the message names the field, the value and what is allowed."""


@dataclass(frozen=True)
class ClassAdjustment:
    """What a class's priority is changed by, and the evidence: number of labels, diff score
    (mean label mapped to 0..1), its upper confidence bound, and whose labels they are. Basis
    `operator` is a person's decision without labels."""

    adjustment: int
    labels: int
    score: float
    upper: float
    basis: Basis


@dataclass(frozen=True)
class Policy:
    """Priority adjustments by class key ("tenant/route/template", "tenant/route" or "tenant").

    `max_effect` bounds every adjustment on use. Raises `PolicyError` when a field is not valid.
    """

    policy_id: str
    created_at: datetime
    expires_at: datetime
    direction: Direction
    enabled: bool
    dry_run: bool
    max_effect: int
    old_build: str
    new_build: str
    classes: dict[str, ClassAdjustment]

    def __post_init__(self) -> None:
        if not self.policy_id:
            raise PolicyError("policy_id is empty: give the policy a name")
        if len(self.policy_id) > MAX_ID_CHARS or not self.policy_id.isprintable():
            raise PolicyError(
                f"policy_id has {len(self.policy_id)} characters: at most {MAX_ID_CHARS} printable "
                "ones are allowed"
            )
        if self.direction not in get_args(Direction):
            raise PolicyError(f"direction {self.direction!r} is not known: use 'demote_harmed'")
        if not 0 <= self.max_effect <= MAX_EFFECT_LIMIT:
            raise PolicyError(f"max_effect {self.max_effect} is not within 0..{MAX_EFFECT_LIMIT}")
        for name in ("created_at", "expires_at"):
            if getattr(self, name).tzinfo is None:
                raise PolicyError(f"{name} has no time zone: write it in UTC, ending in +00:00")
        for key, entry in self.classes.items():
            _check_class(key, entry)

    def adjustment(self, class_key: str, now: datetime) -> int:
        """Change of priority for requests of `class_key` at `now`; 0 when the policy is not in
        force. The most specific class present wins; the result is within +-max_effect."""
        if not self.in_force(now):
            return 0
        return self.planned(class_key)

    def planned(self, class_key: str) -> int:
        """The adjustment this policy would make if it were in force (what a dry run shows)."""
        key = class_key
        while key:
            entry = self.classes.get(key)
            if entry is not None:
                return max(-self.max_effect, min(self.max_effect, entry.adjustment))
            key = key.rpartition("/")[0]
        return 0

    def in_force(self, now: datetime) -> bool:
        """Whether the policy changes anything at `now`."""
        return self.enabled and not self.dry_run and now < self.expires_at

    def to_json(self) -> str:
        """The policy as the file's text, keys in a fixed order, times as ISO 8601 in UTC."""
        fields = asdict(self)
        for name in ("created_at", "expires_at"):
            fields[name] = getattr(self, name).astimezone(UTC).isoformat()
        return json.dumps({"schema": SCHEMA, **fields}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Read a policy file's text. Raises `PolicyError` naming the field that is wrong."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"the policy is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise PolicyError(f"the policy is a JSON {type(raw).__name__}, not an object")
        if raw.get("schema") != SCHEMA:
            raise PolicyError(f"schema is {raw.get('schema')!r}: this version reads {SCHEMA!r}")
        unknown = sorted(raw.keys() - cls.__dataclass_fields__.keys() - {"schema"})
        if unknown:
            raise PolicyError(f"unknown field {unknown[0]!r}: remove it or update inferloop")
        return cls(
            policy_id=_take(raw, "policy_id", str),
            created_at=_time(raw, "created_at"),
            expires_at=_time(raw, "expires_at"),
            direction=_take(raw, "direction", str),
            enabled=_take(raw, "enabled", bool),
            dry_run=_take(raw, "dry_run", bool),
            max_effect=_take(raw, "max_effect", int),
            old_build=_take(raw, "old_build", str),
            new_build=_take(raw, "new_build", str),
            classes={
                key: _class_from(key, entry) for key, entry in _take(raw, "classes", dict).items()
            },
        )


def _check_class(key: str, entry: ClassAdjustment) -> None:
    where = f"classes[{key!r}]"
    if not key or key.startswith("/") or key.endswith("/"):
        raise PolicyError(f"{where}: a class key is tenant[/route[/template]]")
    if abs(entry.adjustment) > MAX_EFFECT_LIMIT:
        raise PolicyError(
            f"{where}.adjustment {entry.adjustment} is not within +-{MAX_EFFECT_LIMIT}"
        )
    if entry.labels < 0:
        raise PolicyError(f"{where}.labels {entry.labels} is negative")
    for name in ("score", "upper"):
        value = getattr(entry, name)
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise PolicyError(f"{where}.{name} {value} is not within 0..1")
    if entry.basis not in get_args(Basis):
        raise PolicyError(f"{where}.basis {entry.basis!r} is none of {', '.join(get_args(Basis))}")


def _take(raw: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    if name not in raw:
        raise PolicyError(f"{where}{name} is missing")
    value = raw[name]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise PolicyError(
            f"{where}{name} is {value!r}: expected a JSON value of type {kind.__name__}"
        )
    return value


def _number(raw: Mapping[str, Any], name: str, where: str) -> float:
    try:
        return float(_take(raw, name, float, where))
    except OverflowError as error:
        raise PolicyError(f"{where}{name} is too large: it must be within 0..1") from error


def _time(raw: Mapping[str, Any], name: str) -> datetime:
    text = _take(raw, name, str)
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise PolicyError(f"{name} is {text!r}: expected ISO 8601 in UTC") from error


def _class_from(key: str, entry: object) -> ClassAdjustment:
    where = f"classes[{key!r}]."
    if not isinstance(entry, dict):
        raise PolicyError(f"classes[{key!r}] is not an object")
    unknown = sorted(entry.keys() - ClassAdjustment.__dataclass_fields__.keys())
    if unknown:
        raise PolicyError(f"{where}{unknown[0]} is not a known field")
    return ClassAdjustment(
        adjustment=_take(entry, "adjustment", int, where),
        labels=_take(entry, "labels", int, where),
        score=_number(entry, "score", where),
        upper=_number(entry, "upper", where),
        basis=_take(entry, "basis", str, where),
    )


def write_policy(path: Path, policy: Policy) -> None:
    """Replace the policy file at `path` atomically: a reader sees the old or the new one, whole.

    Raises OSError (disk full, no permission) and then leaves the old file untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(policy.to_json())
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@dataclass(frozen=True)
class PolicyChange:
    """What a poll found: the policy now in use (None: neutral) and why, in words."""

    policy: Policy | None
    reason: str

    @property
    def policy_id(self) -> str | None:
        return None if self.policy is None else self.policy.policy_id


class PolicyFile:
    """Follows a policy file. Whatever is wrong with it means neutral, never an exception.

    `current` is the policy last read, as long as it has not expired; else None. A policy that is
    disabled or a dry run is current, and adjusts nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.current: Policy | None = None
        self._stamp: tuple[int, int, int] | str | None = None

    def poll(self, now: datetime) -> PolicyChange | None:
        """Look at the file (one `stat` unless it changed). Returns what changed since the last
        poll, or None; a file that was never there is no change."""
        try:
            status = os.stat(self.path)
            stamp: tuple[int, int, int] | str | None
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        except FileNotFoundError:
            stamp = None
        except OSError as error:
            stamp = str(error)
        if stamp != self._stamp:
            self._stamp = stamp
            return self._reload(stamp, now)
        if self.current is not None and now >= self.current.expires_at:
            return self._neutral(_expired(self.current))
        return None

    def _reload(self, stamp: tuple[int, int, int] | str | None, now: datetime) -> PolicyChange:
        if stamp is None:
            return self._neutral("the policy file is gone")
        if isinstance(stamp, str):
            return self._neutral(f"the policy file cannot be read: {stamp}")
        try:
            policy = Policy.from_json(_read(self.path))
        except FileNotFoundError:
            self._stamp = None
            return self._neutral("the policy file is gone")
        except (OSError, UnicodeDecodeError, PolicyError) as error:
            return self._neutral(f"the policy file cannot be used: {error}")
        if now >= policy.expires_at:
            return self._neutral(_expired(policy))
        self.current = policy
        return PolicyChange(policy, _describe(policy))

    def _neutral(self, reason: str) -> PolicyChange:
        self.current = None
        return PolicyChange(None, f"{reason}; no class is adjusted")


def _read(path: Path) -> str:
    # Not blocking: opening a pipe would wait for its writer, and the engine with it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise PolicyError("it is not a regular file")
        data = file.read(MAX_POLICY_BYTES + 1)
    if len(data) > MAX_POLICY_BYTES:
        raise PolicyError(f"the file is larger than {MAX_POLICY_BYTES} bytes")
    return data.decode("utf-8")


def _expired(policy: Policy) -> str:
    return f"policy {policy.policy_id} expired at {policy.expires_at.isoformat()}"


def _describe(policy: Policy) -> str:
    count = sum(entry.adjustment != 0 for entry in policy.classes.values())
    classes = "1 class" if count == 1 else f"{count} classes"
    if not policy.enabled:
        state = "disabled, no class is adjusted"
    elif policy.dry_run:
        state = f"dry run, {classes} would be adjusted"
    else:
        state = f"{classes} adjusted by at most {policy.max_effect}"
    return f"policy {policy.policy_id} loaded: {state}"
