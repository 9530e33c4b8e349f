"""The traffic's contract: what is published stays valid, and what files break is found by line."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from capture.contract import check
from capture.contract.check import check_files
from capture.contract.compatibility import compare
from capture.contract.drift import Profile, compare_profiles, holm
from capture.contract.language import language_of
from capture.contract.schema import published_schema, read_schema, traffic_schema
from capture.mirroring.traffic_files import TrafficFileError, numbered_lines, traffic_files
from capture.traffic import TrafficRecord
from cli.main import app, load_commands
from tests.capture.test_mirror import record

load_commands()


def line(number: int, **changes: Any) -> bytes:
    valid = TrafficRecord.model_validate(record(number) | changes)
    return valid.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n"


def broken(number: int, **changes: Any) -> bytes:
    return json.dumps(json.loads(line(number)) | changes).encode() + b"\n"


def test_what_this_version_writes_is_compatible_with_what_was_published() -> None:
    """A change that breaks somebody needs inferloop.traffic/2 and its own published schema."""
    assert [
        change for change in compare(published_schema(), traffic_schema()) if change.breaks
    ] == []


def test_the_schema_is_a_schema_and_tags_content_and_units() -> None:
    schema = traffic_schema()
    Draft202012Validator.check_schema(schema)
    fields = schema["properties"]
    for name in ("messages", "prompt", "rendered_prompt", "output_text", "output_token_ids"):
        assert fields[name]["x-pii"] == "content"
    assert fields["client"]["x-pii"] == "pseudonym"
    for name, value in fields.items():
        if name.endswith("_ms"):
            assert value["x-unit"] == "ms"


@pytest.mark.parametrize(
    ("path", "change", "breaks"),
    [
        (("properties", "note"), {"type": "string"}, None),
        (("required",), ["note"], "files"),
        (("properties", "priority", "maximum"), 90, "files"),
        (("properties", "priority", "maximum"), 200, "readers"),
        (("properties", "stream", "type"), "string", "files"),
        (("properties", "ttft_ms", "x-unit"), "s", "meaning"),
        (("properties", "client", "x-pii"), None, "meaning"),
        (("properties", "messages"), None, "readers"),
        (("properties", "request_id", "pattern"), "^x$", "files"),
        (("properties", "endpoint", "enum"), ["/v1/completions"], "files"),
        (("$defs", "Sampling", "properties", "top_p", "maximum"), 0.5, "files"),
        (("$defs", "Chunk", "properties", "tokens", "x-unit"), "bytes", "meaning"),
    ],
)
def test_a_change_is_named_with_whom_it_breaks(
    path: tuple[str, ...], change: Any, breaks: str | None
) -> None:
    old, new = traffic_schema(), copy.deepcopy(traffic_schema())
    inner = new
    for part in path[:-1]:
        inner = inner[part]
    if change is None:
        del inner[path[-1]]
    elif path == ("required",):
        inner["required"] = [*inner["required"], *change]
        inner["properties"]["note"] = {"type": "string"}
    else:
        inner[path[-1]] = change
    found = compare(old, new)
    assert found
    assert found[0].breaks == breaks
    assert compare(old, old) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no schema of traffic"),
        ("{", "no JSON"),
        ('{"properties": []}', "no JSON Schema: properties"),
        ('{"properties": {"a": {"$ref": "#/$defs/none"}}}', "has no #/"),
        (
            '{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}',
            "refers to itself",
        ),
    ],
)
def test_a_file_that_is_no_schema_is_refused_with_what_is_wrong(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(content)
    with pytest.raises(TrafficFileError, match=message):
        compare(read_schema(path), {"properties": {"a": True}})


def test_a_violation_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(broken(1, redactions={"\x1b[31m": "\x9b\u202e"}))
    (violation,) = check_files(path).violations
    assert str(violation).isprintable()


def test_every_violation_is_named_by_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        line(1)
        + b"{no json\n"
        + broken(2, priority="7")
        + broken(3, surprise=1)
        + broken(4, sampling={"max_tokens": 4, "temperature": 0, "top_p": 3})
        + broken(5, usage={"prompt_tokens": -1, "completion_tokens": 1})
        + broken(6, arrival="yesterday")
        + line(1)
        + b'{"schema": 1, "schema": 2}\n'
        + b"\n"
        + line(7)
    )
    records: list[dict[str, Any]] = []
    checked = check_files(path, records.append)
    assert [(v.line, v.field) for v in checked.violations if v.field != "schema"] == [
        (2, ""),
        (3, "priority"),
        (4, ""),
        (5, "sampling.top_p"),
        (6, "usage.prompt_tokens"),
        (7, "arrival"),
        (8, "request_id"),
        (9, ""),
    ]
    assert "surprise" in checked.violations[2].reason
    assert '"7" is not integer' in checked.violations[1].reason
    assert "occurs twice" in checked.violations[-1].reason
    assert (checked.lines, checked.broken_lines, len(records)) == (10, 8, 2)


def test_the_schema_and_the_record_type_agree_on_what_is_valid(tmp_path: Path) -> None:
    """Readers use the type, other tools the schema: a line is valid for both or for none."""
    changes: list[dict[str, Any]] = [
        {"stream": 1},
        {"priority": 101},
        {"tenant": None},
        {"chunks": [{"at_ms": 1.5, "tokens": 2}]},
        {"chunks": [{"at_ms": 1.5}]},
        {"usage": None},
        {"redactions": {"EMAIL": 2}},
        {"logprobs": [None, -0.5]},
        {"top": [{"position": -1, "token_ids": [], "logprobs": []}]},
        {"request_id": "xyz"},
    ]
    for number, change in enumerate(changes):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(broken(number, **change))
        data = path.read_bytes()
        try:
            TrafficRecord.model_validate_json(data, strict=True)
            valid = True
        except ValueError:
            valid = False
        assert (check_files(path).broken_lines == 0) == valid, change


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["2026-11-29", "2026-11-29T12:00:00Z", "a" * 32, "/v1/completions", 2**70]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=150)
@given(st.sampled_from(sorted(TrafficRecord.model_fields)), JSON_VALUES, st.booleans())
def test_the_short_way_to_a_verdict_leads_to_the_same(name: str, value: Any, twice: bool) -> None:
    """What passes for clearly valid has no violation when the schema is asked."""
    field = "schema" if name == "schema_" else name
    text = broken(1, **{field: value}).rstrip()
    if twice:
        text = text[:-1] + b', "x": 1}'.replace(b"x", field.encode())
    if check._valid_record(text) is not None:
        assert check._judged(check._validator(), text)[1] == []
    if twice:
        assert check._valid_record(text) is None


@pytest.mark.parametrize(
    "content", ['a "name": value', 'an "odd" : one', "{}", '\\": ', "line\u2028break", "\x00"]
)
def test_text_that_looks_like_json_is_no_violation(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.jsonl"
    messages = [{"role": "user", "content": content, "parts": [1, {"a": 1}]}]
    path.write_bytes(line(1, messages=messages) + broken(2, messages=messages))
    checked = check_files(path)
    assert (checked.lines, checked.broken_lines) == (2, 0)
    twice = line(3).rstrip()[:-1] + b',"messages":[{"a":1,"a" :2}]}\n'
    path.write_bytes(twice)
    assert "occurs twice" in check_files(path).violations[0].reason


def test_compressed_and_unfinished_files_are_read(tmp_path: Path) -> None:
    packed = zstandard.compress(line(1)) + zstandard.compress(line(2))
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    (tmp_path / "b.jsonl.part").write_bytes(line(3) + line(4)[:50])
    checked = check_files(tmp_path)
    assert (checked.lines, checked.unfinished, checked.broken_lines) == (3, 1, 0)
    (tmp_path / "c.jsonl.zst").write_bytes(b"nothing of the kind")
    with pytest.raises(TrafficFileError, match="decompress"):
        check_files(tmp_path)


def test_of_a_line_beyond_all_measure_only_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.mirroring.traffic_files.LONGEST_LINE", 2000)
    path = tmp_path / "t.jsonl"
    path.write_bytes(line(1) + b"x" * 9999 + b"\n" + line(2) + b"y" * 2000 + b"\n" + b"z" * 4000)
    found = list(numbered_lines(path))
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    assert max(len(part) for _, part in found) == 2000
    assert check_files(path).broken_lines == 3


def test_a_file_renamed_while_it_is_read_is_found_under_its_later_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.part").write_bytes(line(1))
    (listed,) = traffic_files(tmp_path)
    listed.unlink()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(line(1)))
    assert len(list(numbered_lines(listed))) == 1


def test_no_traffic_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(TrafficFileError, match="--mirror-share"):
        traffic_files(tmp_path)
    with pytest.raises(TrafficFileError, match="no traffic at"):
        traffic_files(tmp_path / "nowhere")


@pytest.fixture
def quick_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text's language is told once: the profiles here hold two texts."""
    monkeypatch.setattr("capture.contract.drift.language_of", cache(language_of))


def profile(count: int, seed: int, **changes: Any) -> Profile:
    draw = random.Random(seed)
    result = Profile()
    valid = json.loads(line(1))
    for _ in range(count):
        tokens = max(1, int(draw.lognormvariate(5, 1) * changes.get("longer", 1)))
        tenant = draw.choices(["a", "b", "c"], changes.get("mix", (6, 3, 1)))[0]
        item = valid | {
            "tenant": tenant,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 9},
        }
        text = "Where is the nearest railway station in this town?"
        foreign = "Wo ist denn hier in der Stadt der nächste Bahnhof, bitte?"
        german = draw.random() < changes.get("german", 0.1)
        item["messages"] = [{"role": "user", "content": foreign if german else text}]
        result.add(item)
    return result


def drifted(new: Profile, baseline: Profile) -> set[str]:
    return {item.feature for item in compare_profiles(new, baseline) if item.verdict == "drift"}


@pytest.mark.usefixtures("quick_languages")
def test_drift_is_found_where_it_is_and_nowhere_else() -> None:
    baseline = profile(1500, 1)
    assert drifted(profile(1500, 2), baseline) == set()
    assert drifted(profile(1500, 3, longer=2), baseline) == {"prompt tokens"}
    assert drifted(profile(1500, 4, mix=(2, 3, 5)), baseline) == {"tenant"}
    assert {"language"} <= drifted(profile(1500, 5, german=0.6), baseline)


@pytest.mark.usefixtures("quick_languages")
def test_the_same_distribution_rarely_drifts_over_many_tests() -> None:
    baseline = profile(300, 100)
    false_alarms = sum(bool(drifted(profile(300, seed), baseline)) for seed in range(20))
    assert false_alarms <= 1


def test_categories_that_are_all_rare_say_so() -> None:
    profiles = Profile(), Profile()
    for side, found in enumerate(profiles):
        for number in range(50):
            found.add(json.loads(line(number, tenant=f"{side}-{number}")))
    (tenant,) = (item for item in compare_profiles(*profiles) if item.feature == "tenant")
    assert (tenant.verdict, tenant.detail) == ("same", "all rare")


def test_numbers_that_no_float_holds_are_left_out_of_the_comparison(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    usage = {"prompt_tokens": 10**400, "completion_tokens": 1}
    path.write_bytes(broken(1, usage=usage))
    found = Profile()
    assert check_files(path, found.add).broken_lines == 0
    assert dict(found.numbers)["output tokens"] == [1.0]
    assert "prompt tokens" not in found.numbers


def test_few_records_are_not_judged() -> None:
    assert {item.verdict for item in compare_profiles(profile(5, 1), profile(500, 2))} == {
        "too few"
    }


def test_a_long_file_is_sampled_evenly_and_in_bounded_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr("capture.contract.drift.SAMPLE", 100)
    item = json.loads(line(1))
    found = Profile()
    for number in range(1000):
        found.add(item | {"priority": number % 101 if number < 500 else 0})
    values = found.numbers["priority"]
    assert len(values) <= 100
    assert 0.3 < sum(value == 0 for value in values) / len(values) < 0.7


def test_holm_corrects_as_published() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_the_command_reports_and_exits_by_what_it_found(tmp_path: Path) -> None:
    good, bad, other = (tmp_path / name for name in ("good.jsonl", "bad.jsonl", "other.jsonl"))
    good.write_bytes(b"".join(line(number) for number in range(60)))
    bad.write_bytes(line(1) + broken(2, priority="7"))
    other.write_bytes(b"".join(line(number, tenant="z") for number in range(60)))
    run = CliRunner().invoke
    assert run(app, ["traffic", "check", str(good), "--baseline", str(good)]).exit_code == 0
    result = run(app, ["traffic", "check", str(bad)])
    assert result.exit_code == 1
    assert f"{bad}:2: priority" in result.stdout
    result = run(app, ["traffic", "check", str(other), "--baseline", str(good)])
    assert result.exit_code == 2
    assert "drifted: tenant" in result.stdout
    result = run(app, ["traffic", "check", str(good), "--baseline", str(bad)])
    assert "nothing compared: too few records" in result.stdout
    other.write_bytes(b"".join(broken(number, tenant="\x1b[2J\ud800") for number in range(60)))
    result = run(app, ["traffic", "check", str(other), "--baseline", str(good)])
    assert result.exit_code == 2
    assert "\x1b[2J" not in result.stdout
    report = json.loads(run(app, ["traffic", "check", str(bad), "--json"]).stdout)
    assert report["broken_lines"] == 1
    schema = tmp_path / "schema.json"
    schema.write_text(run(app, ["traffic", "schema"]).stdout)
    assert run(app, ["traffic", "compare", str(schema)]).stdout == "no change\n"
