"""Whether a newer version of a record's schema still serves those who knew the older one.

A change breaks *files* when some that were valid no longer are, *readers* when what they relied on
may be missing or of another kind, and *meaning* when a unit or a personal-data tag is another.
New optional fields break nothing: readers leave alone what they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from capture.contract.schema import TAGS
from capture.mirroring.traffic_files import TrafficFileError

Schema = dict[str, Any]
Breaks = Literal["files", "readers", "meaning"]

LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
EXACT = ("pattern", "format", "const")


class Change(NamedTuple):
    """One difference; `path` as in `sampling.top_p`, items of arrays as `chunks[]`."""

    path: str
    text: str
    breaks: Breaks | None


def compare(old: Schema, new: Schema) -> list[Change]:
    """All differences from `old` to `new` that a reader or a writer could notice. Raises
    TrafficFileError for a schema that refers to what it has not, or to itself."""
    try:
        return list(_node("", _flat(old, old), _flat(new, new), old, new))
    except RecursionError as error:
        raise TrafficFileError("the schema refers to itself: compare it by hand") from error


def _flat(schema: Schema | bool, root: Schema) -> Schema:
    """The schema with references followed and `X or null` folded into X; `types` names its types.

    Alternatives of several kinds stay: their types are compared, their insides are not.
    """
    if isinstance(schema, bool):  # anything, or nothing
        return {"types": {"anything"}} if schema else {"types": set()}
    if "$ref" in schema:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        definition = root.get("$defs", {}).get(schema["$ref"].removeprefix("#/$defs/"))
        if definition is None:
            raise TrafficFileError(f"the schema has no {schema['$ref']}, to which it refers")
        return {**_flat(definition, root), **beside}
    alternatives = [_flat(part, root) for part in schema.get("anyOf", ())]
    if not alternatives:
        return {**schema, "types": {str(schema.get("type", "anything"))}}
    types = set().union(*(part["types"] for part in alternatives))
    inner = [part for part in alternatives if part["types"] != {"null"}]
    beside = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**(inner[0] if len(inner) == 1 else {}), **beside, "types": types}


def _node(
    path: str, old: Schema, new: Schema, old_root: Schema, new_root: Schema
) -> Iterator[Change]:
    yield from _types(path, old, new)
    yield from _values(path, old, new)
    yield from _bounds(path, old, new)
    for tag in TAGS:
        if old.get(tag) != new.get(tag):
            yield Change(path, _was_is(tag, old.get(tag), new.get(tag)), "meaning")
    yield from _fields(path, old, new, old_root, new_root)
    for keyword, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        before, after = old.get(keyword), new.get(keyword)
        if isinstance(before, dict) and isinstance(after, dict):
            flat = _flat(before, old_root), _flat(after, new_root)
            yield from _node(path + suffix, *flat, old_root, new_root)


def _fields(
    path: str, old: Schema, new: Schema, old_root: Schema, new_root: Schema
) -> Iterator[Change]:
    before, after = old.get("properties", {}), new.get("properties", {})
    needed_before, needed = set(old.get("required", ())), set(new.get("required", ()))
    for name in sorted({*before, *after}):
        inner = f"{path}.{name}" if path else name
        if name not in after:
            yield Change(inner, "was taken away", "readers")
        elif name not in before:
            text = "is new and required" if name in needed else "is new, optional"
            yield Change(inner, text, "files" if name in needed else None)
        else:
            if name in needed - needed_before:
                yield Change(inner, "was optional, is required", "files")
            if name in needed_before - needed:
                yield Change(inner, "was required, is optional", "readers")
            flat = _flat(before[name], old_root), _flat(after[name], new_root)
            yield from _node(inner, *flat, old_root, new_root)


def _types(path: str, old: Schema, new: Schema) -> Iterator[Change]:
    gone, more = old["types"] - new["types"], new["types"] - old["types"]
    if "integer" in gone and "number" in new["types"]:
        gone = gone - {"integer"}
    if gone:
        yield Change(path, f"no longer takes {_listed(gone)}", "files")
    if more:
        yield Change(path, f"takes {_listed(more)} too", "readers")


def _values(path: str, old: Schema, new: Schema) -> Iterator[Change]:
    """Differences in the listed values, exact rules and unknown fields."""
    before, after = set(old.get("enum", ())), set(new.get("enum", ()))
    if before - after or (after and not before):
        gone = _listed(before - after) if after and before else "values that are not listed"
        yield Change(path, f"no longer takes {gone}", "files" if after else "readers")
    if before and after - before:
        yield Change(path, f"takes {_listed(after - before)} too", "readers")
    for keyword in EXACT:
        if old.get(keyword) != new.get(keyword):
            text = _was_is(keyword, old.get(keyword), new.get(keyword))
            yield Change(path, text, "readers" if new.get(keyword) is None else "files")
    open_before, open_now = (part.get("additionalProperties", True) for part in (old, new))
    if open_now is False and open_before is not False:
        yield Change(path, "no longer takes unknown fields", "files")
    if open_before is False and open_now is not False:
        yield Change(path, "takes unknown fields too", None)


def _bounds(path: str, old: Schema, new: Schema) -> Iterator[Change]:
    for keywords, sign in ((LOWER, 1), (UPPER, -1)):
        for keyword in keywords:
            before, after = old.get(keyword), new.get(keyword)
            if before == after:
                continue
            narrower = after is not None and (before is None or (after - before) * sign > 0)
            text = _was_is(keyword, before, after)
            yield Change(path, text, "files" if narrower else "readers")


def _was_is(name: str, before: Any, after: Any) -> str:
    shown = ["none" if value is None else value for value in (before, after)]
    return f"{name} was {shown[0]}, is {shown[1]}"


def _listed(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values)))
