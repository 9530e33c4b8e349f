"""The traffic mirror: whole conversations, no personal data, every record accounted for."""

from __future__ import annotations

import json
import logging
import math
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import capture.mirror
from capture.errors import SettingsError
from capture.mirror import Mirror
from capture.mirroring.mirror_metrics import MirrorCollector
from capture.mirroring.sampling import MirrorError, is_sampled, key_id, load_key, pseudonym
from capture.mirroring.traffic_files import numbered_lines, traffic_files
from capture.mirroring.traffic_writer import FilePolicy
from capture.settings import Settings
from capture.traffic import TrafficRecord
from tests.waiting import PATIENCE_S, until

KEY = b"a key of the tests"
SECRETS = ("jane.doe@example.com", "4111 1111 1111 1111", "203.0.113.9", "session-cookie-1")


def record(number: int, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "schema": "inferloop.traffic/1",
        "request_id": f"{number:032x}",
        "conversation_id": f"c{number}",
        "arrival": "2026-11-29T12:00:00.000000+00:00",
        "arrival_ns": number,
        "endpoint": "/v1/chat/completions",
        "tenant": "t",
        "route": "chat",
        "class_key": "t/chat/-",
        "model": "m",
        "messages": [{"role": "user", "content": f"question {number}"}],
        "prompt_token_ids": [1, 2, 3],
        "sampling": {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0},
        "output_text": "answer",
        "output_token_ids": [4, 5],
        "client": "203.0.113.9",
        "headers": {"Authorization": "Bearer x", "Cookie": "session-cookie-1", "X-Route": "chat"},
    }
    return raw | changes


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for f in traffic_files(directory) for _, line in numbered_lines(f)]


def personal(number: int, size: int = 0) -> list[dict[str, Any]]:
    text = f"I am {SECRETS[0]}, card {SECRETS[1]}. " + "filler words " * (size // 13)
    return [{"role": "user", "content": text + f"again {SECRETS[0]}"}]


def test_a_thousand_requests_with_personal_data_leave_none_of_it(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY, queue_size=2000, max_body_bytes=1 << 17)
    for number in range(1000):
        changes: dict[str, Any] = {"messages": personal(number)}
        if number < 10:
            changes |= {"status": 400, "error_type": "invalid_request_error", "output_text": None}
        elif number < 20:
            changes |= {"finish_reason": "abort", "output_text": f"so {SECRETS[0]} is"}
        elif number < 30:
            changes["messages"] = personal(number, size=1 << 18)
        elif number < 40:
            changes["tenant"] = changes["conversation_id"] = SECRETS[0]
        elif number < 45:
            changes["messages"] = "not a list"
        mirror.offer(record(number, **changes))
    mirror.close(PATIENCE_S)
    counters = mirror.counters
    written = lines(tmp_path)
    assert counters.offered == 1000
    assert counters.written == len(written)
    assert counters.written + sum(counters.skipped.values()) == 1000
    assert counters.skipped == {"invalid": 5}
    assert counters.truncated == 10
    content = json.dumps(written)
    for secret in (*SECRETS, "Authorization", "jane", "4111"):
        assert secret not in content
    assert all(TrafficRecord.model_validate(line) for line in written)
    assert not any("prompt_token_ids" in line for line in written)
    big = next(line for line in written if line["request_id"] == f"{20:032x}")
    assert big["truncated"]
    assert big["original_bytes"] > 1 << 18


def test_headers_are_an_allow_list_and_addresses_pseudonyms(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    mirror.offer(record(1))
    mirror.close(PATIENCE_S)
    (line,) = lines(tmp_path)
    assert line["headers"] == {"x-route": "chat"}
    assert line["client"] == pseudonym("203.0.113.9", KEY)
    assert line["client"] != pseudonym("203.0.113.9", b"another key")
    assert line["client_key_id"] == key_id(KEY)
    assert pseudonym("::ffff:203.0.113.9", KEY) == line["client"]


@pytest.mark.parametrize("what", ["redact_record", "truncate_record"])
def test_failed_redaction_drops_the_content_and_counts_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    """Of a failed request, too; and the log says where it failed, not about what."""
    caplog.set_level(logging.DEBUG)
    real = getattr(capture.mirror, what)

    def failing(raw: dict[str, Any], *limit: int) -> dict[str, Any]:
        if "messages" in raw:
            raise RuntimeError(f"no redaction of {raw['messages']}")
        return real(raw, *limit)

    monkeypatch.setattr(capture.mirror, what, failing)
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    sampling = {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "stop": [SECRETS[0]]}
    content = {"messages": personal(1), "prompt_token_ids": [7], "sampling": sampling}
    mirror.offer(record(1, **content))
    mirror.offer(record(2, **content, status=400, error_type="invalid_request_error"))
    mirror.offer(record(3, **content, status=499, error_type="cancelled", output_text=SECRETS[0]))
    mirror.close(PATIENCE_S)
    written = lines(tmp_path)
    assert [line["dropped"] for line in written] == ["redaction failed"] * 3
    for line in written:
        assert not {"messages", "prompt_token_ids", "output_text", "output_token_ids"} & set(line)
    assert mirror.counters.dropped == 3
    assert caplog.text.count("RuntimeError in ") == 1
    for secret in SECRETS:
        assert secret not in caplog.text + json.dumps(written)


@pytest.mark.parametrize(
    "field",
    [
        {"chunks": [{"at_ms": 1.0, "tokens": SECRETS[0]}]},
        {"chunks": [{"at_ms": 1.0, "tokens": 1, "note": SECRETS[0]}]},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 1, SECRETS[0]: 1}},
        {"top": [{"position": 0, "token_ids": [1], "logprobs": [-0.1], "text": SECRETS[0]}]},
    ],
)
def test_text_where_only_numbers_belong_is_not_written(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    mirror.offer(record(1, **field))
    mirror.close(PATIENCE_S)
    assert mirror.counters.skipped == {"invalid": 1}
    assert not list(tmp_path.iterdir())


def test_a_redactor_that_always_raises_costs_the_record_which_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(raw: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError(str(raw))

    monkeypatch.setattr(capture.mirror, "redact_record", failing)
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    mirror.offer(record(1, messages=personal(1)))
    mirror.close(PATIENCE_S)
    assert mirror.counters.skipped == {"failed": 1}
    assert not list(tmp_path.iterdir())
    assert SECRETS[0] not in caplog.text


def test_all_counters_are_metrics(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY, max_body_bytes=100)
    registry = CollectorRegistry()
    registry.register(MirrorCollector(mirror, "inferloop:mirror", {"engine": "0"}))
    mirror.offer(record(1, messages=personal(1, size=200)))
    mirror.skip("unreadable")
    mirror.close(PATIENCE_S)
    mirror.offer(record(2))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"inferloop:mirror_{name}", {"engine": "0"} | labels)

    assert value("records_offered_total") == 3
    assert value("records_written_total") == value("records_truncated_total") == 1
    assert value("records_skipped_total", reason="unreadable") == 1
    assert value("records_skipped_total", reason="closed") == 1
    assert value("redactions_total", kind="email") == 1
    assert value("written_bytes_total") == mirror.counters.bytes > 0
    assert value("records_dropped_total") == value("files_deleted_total") == 0
    assert value("records_queued") == 0


def test_the_settings_reach_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, setting in {
        "HOME": str(tmp_path), "MIRROR_BODY_KIB": "1", "MIRROR_ROTATE_MIB": "0.002",
        "MIRROR_COMPRESS": "false", "MIRROR_FSYNC": "always", "MIRROR_MAX_GIB": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"INFERLOOP_{name}", setting)
    mirror = Mirror.from_settings(Settings(), 1.0)
    for number in range(5):
        mirror.offer(record(number, messages=personal(number, size=4000)))
    mirror.close(PATIENCE_S)
    assert len(list((tmp_path / "traffic").glob("*.jsonl"))) > 1
    assert mirror.counters.truncated == 5
    monkeypatch.setenv("INFERLOOP_MIRROR_FSYNC", "never")
    with pytest.raises(SettingsError, match="INFERLOOP_MIRROR_FSYNC"):
        Settings()


def test_odd_records_are_counted_and_never_raise(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    mirror.offer({})
    mirror.offer(record(1, messages=[{"role": "user", "content": nested}]))
    mirror.offer(record(2, messages=[{"role": "user", "content": "lone \ud83d surrogate \x00"}]))
    mirror.offer(record(3, margins=[float("nan"), 1.0], logprobs=[float("-inf"), -0.5]))
    mirror.offer(record(4, messages=[{"role": "assistant", "content": None, "name": "x"}]))
    mirror.offer(record(5, surprise=1))
    mirror.close(PATIENCE_S)
    mirror.offer(record(6))
    counters = mirror.counters
    assert counters.offered == 7
    assert counters.written + sum(counters.skipped.values()) == 7
    assert counters.skipped["closed"] == 1
    by_id = {int(line["request_id"], 16): line for line in lines(tmp_path)}
    assert by_id[3]["margins"] == [None, 1.0]
    assert by_id[3]["logprobs"] == [None, -0.5]
    assert by_id[4]["messages"] == [{"role": "assistant", "content": None, "name": "x"}]
    assert "lone" in by_id[2]["messages"][0]["content"]


def test_a_full_queue_skips_and_offering_stays_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written before all are offered: an offer that waited would wait for ever."""
    gate = threading.Event()
    real = capture.mirror.redact_record

    def slow(raw: dict[str, Any]) -> dict[str, Any]:
        gate.wait()
        return real(raw)

    monkeypatch.setattr(capture.mirror, "redact_record", slow)
    mirror = Mirror(tmp_path, share=1.0, key=KEY, queue_size=10)
    started = time.thread_time()
    for number in range(200):
        mirror.offer(record(number))
    assert time.thread_time() - started < 1
    gate.set()
    mirror.close(PATIENCE_S)
    counters = mirror.counters
    assert counters.skipped["queue_full"] >= 189
    assert counters.written + sum(counters.skipped.values()) == 200 == counters.offered


def test_a_stop_writes_what_it_has_time_for_and_says_what_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The third record takes until the time for a stop is over, and what it needs after that."""
    monkeypatch.setattr(capture.mirror, "GRACE_SECONDS", PATIENCE_S)
    real = capture.mirror.redact_record
    third = threading.Event()

    def slow(raw: dict[str, Any]) -> dict[str, Any]:
        if raw.get("messages") == record(2)["messages"]:
            third.set()
            while time.monotonic() < mirror._give_up_at:
                time.sleep(0.01)
        return real(raw)

    monkeypatch.setattr(capture.mirror, "redact_record", slow)
    files = FilePolicy(compress=False)
    mirror = Mirror(tmp_path, share=1.0, key=KEY, queue_size=50, files=files)
    for number in range(50):
        mirror.offer(record(number))
    assert third.wait(PATIENCE_S)
    mirror.close(0.3)
    counters = mirror.counters
    assert (counters.offered, counters.queued) == (50, 0)
    assert (counters.written, counters.skipped) == (3, {"closed": 47})
    assert len(lines(tmp_path)) == 3
    assert "stopped before 47 records were written" in caplog.text
    assert not list(tmp_path.glob("*.part"))


def test_times_that_json_cannot_hold_are_no_record(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    mirror.offer(record(1, chunks=[{"at_ms": math.nan, "tokens": 1}]))
    top = {"position": 0, "token_ids": [1], "logprobs": [-math.inf]}
    mirror.offer(record(2, top=[top]))
    mirror.close(PATIENCE_S)
    assert mirror.counters.skipped == {"invalid": 2}


def test_files_rotate_by_size_and_are_private(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY, files=FilePolicy(rotate_bytes=2000))
    for number in range(20):
        mirror.offer(record(number))
    mirror.close(PATIENCE_S)
    files = list(tmp_path.iterdir())
    assert len(files) > 3
    assert all(file.name.endswith(".jsonl.zst") for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert sorted(int(line["request_id"], 16) for line in lines(tmp_path)) == list(range(20))


def test_an_idle_file_rotates_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.mirror, "TICK_SECONDS", 0.05)
    mirror = Mirror(tmp_path, share=1.0, key=KEY, files=FilePolicy(rotate_seconds=0.1))
    mirror.offer(record(1))
    until(lambda: [path.suffix for path in tmp_path.iterdir()] == [".zst"], "a finished file")
    mirror.close(PATIENCE_S)


@settings(max_examples=25)
@given(st.binary(min_size=1, max_size=80), st.floats(0.05, 0.95))
def test_sampling_keeps_conversations_and_the_share(key: bytes, share: float) -> None:
    kept = [is_sampled(f"conversation {n}", share, key) for n in range(2000)]
    assert kept == [is_sampled(f"conversation {n}", share, key) for n in range(2000)]
    deviation = (share * (1 - share) / 2000) ** 0.5
    assert abs(sum(kept) / 2000 - share) < 5 * deviation


def test_requests_of_a_conversation_share_its_fate(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=0.3, key=KEY, queue_size=2000)
    for number in range(1000):
        mirror.offer(record(number, conversation_id=f"c{number % 100}"))
    mirror.close(PATIENCE_S)
    counters = mirror.counters
    assert counters.written + counters.skipped["not_sampled"] == 1000
    seen: dict[str, int] = {}
    for line in lines(tmp_path):
        seen[line["conversation_id"]] = seen.get(line["conversation_id"], 0) + 1
    assert set(seen.values()) == {10}
    assert 10 < len(seen) < 55


def test_all_and_nothing(tmp_path: Path) -> None:
    assert is_sampled("x", 1.0, KEY)
    assert not is_sampled("x", 0.0, KEY)
    with pytest.raises(MirrorError, match="outside 0 to 1"):
        Mirror(tmp_path, share=1.5, key=KEY)
    with pytest.raises(MirrorError, match="INFERLOOP_MIRROR_KEY"):
        Mirror(tmp_path, share=1.0, key=b"")


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = load_key(home, None)
    assert len(first) == 32
    assert load_key(home, None) == first
    assert stat.S_IMODE((home / "mirror.key").stat().st_mode) == 0o600
    assert load_key(home, "given") == b"given"


def test_a_living_writers_file_is_left_alone(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=KEY)
    mirror.offer(record(1))
    until(lambda: mirror.counters.written, "the record")
    other = Mirror(tmp_path, share=1.0, key=KEY)
    other.close(PATIENCE_S)
    assert len(list(tmp_path.glob("*.part"))) == 1
    mirror.close(PATIENCE_S)
