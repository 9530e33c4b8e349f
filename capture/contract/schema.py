"""`inferloop.traffic/1` as a JSON Schema with semantic tags, made from `capture.traffic`.

Tags: `x-pii` says what personal data a field may hold, `x-unit` its unit, `x-limit` where it is
cut. Not for comparing versions (`compatibility`) nor files (`check`).
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from capture.mirroring.traffic_files import TrafficFileError
from capture.traffic import SCHEMA, TrafficRecord

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TAGS = ("x-pii", "x-unit", "x-limit")
PUBLISHED = "traffic-1.json"


@cache
def traffic_schema() -> dict[str, Any]:
    """The schema of the records that this version writes."""
    schema = TrafficRecord.model_json_schema(by_alias=True)
    return {"$schema": DIALECT, "$id": f"urn:{SCHEMA.replace('/', ':')}", **schema}


@cache
def published_schema() -> dict[str, Any]:
    """The schema as it was published: what this version's must stay compatible with."""
    text = resources.files("capture.contract").joinpath(PUBLISHED).read_text()
    schema: dict[str, Any] = json.loads(text)
    return schema


def read_schema(path: Path) -> dict[str, Any]:
    """A JSON Schema from a file. Raises TrafficFileError when it is none."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        schema = json.loads(path.read_bytes())
    except OSError as error:
        raise TrafficFileError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise TrafficFileError(f"{path} is no JSON: {error}") from error
    if not isinstance(schema, dict) or "properties" not in schema:
        raise TrafficFileError(
            f"{path} is no schema of traffic (a JSON object with `properties`): "
            "`inferloop traffic schema` prints one"
        )
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path))
        raise TrafficFileError(
            f"{path} is no JSON Schema: {where}: {error.message:.200}"
        ) from error
    return schema
