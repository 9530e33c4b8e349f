"""Checks traffic files line by line against the schema: every violation with its line and field.

Nothing is coerced: "7" is no integer. Not for comparing distributions: `capture.contract.drift`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic_core

from capture.contract.schema import traffic_schema
from capture.contract.shown import printable
from capture.mirroring.traffic_files import numbered_lines, traffic_files
from capture.traffic import TrafficRecord

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

KEPT_VIOLATIONS = 1000
LONGEST_VALUE = 60

Record = dict[str, Any]

_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one field of one line; `field` is empty when it is the whole line."""

    file: Path
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


@dataclass(slots=True)
class CheckedFiles:
    """What a check found. `violations` keeps the first 1000, `broken_lines` counts all.

    A last line without its end in a file that is still being written is no violation: `unfinished`
    counts those.
    """

    files: list[Path]
    lines: int = 0
    broken_lines: int = 0
    unfinished: int = 0
    violations: list[Violation] = field(default_factory=list)


def check_files(
    path: Path,
    on_record: Callable[[Record], None] = lambda _: None,
    on_line: Callable[[int], None] = lambda _: None,
) -> CheckedFiles:
    """Check a traffic file or directory; valid records go to `on_record` one by one.

    `on_line` is told the lines read so far. Raises TrafficFileError.
    """
    validator = _validator()
    checked = CheckedFiles(traffic_files(path))
    seen: dict[str, str] = {}
    for file in checked.files:
        for number, line in numbered_lines(file):
            if not line.strip():
                continue
            if file.suffix == ".part" and not line.endswith(b"\n"):
                checked.unfinished += 1
                continue
            checked.lines += 1
            on_line(checked.lines)
            record, problems = _checked(validator, line)
            problems += _repeated(record, f"{file.name}:{number}", seen)
            if problems:
                checked.broken_lines += 1
                room = KEPT_VIOLATIONS - len(checked.violations)
                kept = [Violation(file, number, *problem) for problem in problems[:room]]
                checked.violations += kept
            elif record is not None:
                on_record(record)
    return checked


def _validator() -> Any:
    from jsonschema import Draft202012Validator, FormatChecker

    formats = FormatChecker([])
    formats.checks("date-time", raises=ValueError)(_is_time)
    return Draft202012Validator(traffic_schema(), format_checker=formats)


def _is_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value) is not None


def _checked(validator: Any, line: bytes) -> tuple[Record | None, list[tuple[str, str]]]:
    """The line's object if it is one, and its problems as field and reason."""
    valid = _valid_record(line)
    return _judged(validator, line) if valid is None else (valid, [])


def _valid_record(line: bytes) -> Record | None:
    """The line's object if it is clearly valid: fifteen times faster than asking the schema, which
    is made from the same type."""
    try:
        value = pydantic_core.from_json(line, allow_inf_nan=False)
        TrafficRecord.model_validate_json(line, strict=True)
    except ValueError:
        return None
    return value if _has_each_name_once(line, value) else None


def _has_each_name_once(line: bytes, value: Record) -> bool:
    """False when in doubt: the line holds as many names as the object that was made from it, or
    text that looks like some."""
    return _SPACED_COLON.search(line) is None and line.count(b'":') == _count_names(value)


def _count_names(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_count_names, value.values()))
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return sum(map(_count_names, value))
    return 0


def _judged(validator: Any, line: bytes) -> tuple[Record | None, list[tuple[str, str]]]:
    """The same as the schema sees it, with all that is wrong."""
    try:
        value = json.loads(line, parse_constant=_refused, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        return None, [("", f"no JSON: {error}")]
    problems = [problem for error in validator.iter_errors(value) for problem in _problems(error)]
    return (value if isinstance(value, dict) else None), sorted(problems)


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _without_repeats(pairs: list[tuple[str, Any]]) -> Record:
    """Two values of one name: readers would disagree on which one holds."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r:.60} occurs twice in one object")
    return values


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Field and reason; of alternatives (X or null) what is wrong with the one that was meant."""
    for inner in error.context or ():
        if inner.validator != "type" or inner.path:
            yield from _problems(inner)
            return
    where = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path
    )
    yield printable(where.removeprefix(".")), printable(_reason(error))


def _reason(error: ValidationError) -> str:
    shown = json.dumps(error.instance, ensure_ascii=False)
    value = shown if len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]}..."
    match error.validator:
        case "additionalProperties" | "required":
            return str(error.message)
        case "type" | "anyOf":
            return f"{value} is not {_wanted(error)}"
        case _:
            return f"{value} breaks {error.validator} {json.dumps(error.validator_value)}"


def _wanted(error: ValidationError) -> str:
    parts = error.schema.get("anyOf", [error.schema])
    names = [str(part.get("type", "an object")) for part in parts]
    return " or ".join(names)


def _repeated(record: Record | None, place: str, seen: dict[str, str]) -> list[tuple[str, str]]:
    """A request id that an earlier line has: each request is one line."""
    name = (record or {}).get("request_id")
    if not isinstance(name, str):
        return []
    first = seen.setdefault(name, place)
    return [] if first == place else [("request_id", f"{name} was in {first} already")]
