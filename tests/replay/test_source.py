"""Reading traffic: broken lines are reported, clocks that jump do not bend the schedule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import zstandard

from capture.mirror import Mirror
from replay.errors import TrafficError
from replay.source import LONGEST_PAUSE_S, make_records, read_traffic, write_records
from tests.capture.test_mirror import record
from tests.waiting import PATIENCE_S, until


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(item) + "\n" for item in records)


def arrived(number: int, wall_s: int, monotonic_s: float) -> dict[str, Any]:
    wall = f"2026-11-29T12:{wall_s // 60:02d}:{wall_s % 60:02d}.000000+00:00"
    return record(number, arrival=wall, arrival_ns=int(monotonic_s * 1e9), client=None, headers={})


def test_broken_lines_are_skipped_counted_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = lines(arrived(1, 0, 0), arrived(2, 1, 1))
    path.write_bytes(
        good.encode()
        + b'{"schema": "inferloop.traffic/1", "request_id": 7}\n'
        + b"\n\xff\xfe not json\n"
        + lines(arrived(3, 2, 2) | {"schema": "inferloop.traffic/9"}).encode()
        + good[:100].encode()
    )
    found = read_traffic(path)
    assert [item.record.request_id for item in found.records] == [f"{n:032x}" for n in (1, 2)]
    assert [line.line for line in found.broken] == [3, 5, 6, 7]
    assert str(found.broken[0]).startswith(f"{path}:3: request_id: ")
    assert len(found.digest) == 64


def test_what_cannot_be_replayed_is_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        lines(
            arrived(1, 0, 0),
            arrived(1, 0, 0),
            arrived(2, 0, 0) | {"status": 500},
            arrived(3, 0, 0) | {"truncated": True},
            arrived(4, 0, 0) | {"messages": None, "prompt_token_ids": None},
            arrived(5, 0, 0) | {"dropped": "redaction failed"},
            arrived(6, 0, 0) | {"status": 499, "error_type": "cancelled"},
        )
    )
    found = read_traffic(path)
    assert len(found.records) == 2
    assert found.skipped == {"repeated id": 1, "failed": 1, "truncated": 1, "no content": 2}


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"arrival": "yesterday"}, "arrival: "),
        ({"arrival_ns": 10**400}, "arrival_ns: "),
        ({"sampling": {"max_tokens": 1, "temperature": math.inf, "top_p": 1}}, "sampling.temp"),
        ({"\x1b[31m": 1}, "\ufffd[31m: Extra inputs"),
    ],
)
def test_odd_values_make_a_broken_line(tmp_path: Path, odd: dict[str, Any], reason: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(arrived(1, 0, 0) | odd, arrived(2, 1, 1)))
    found = read_traffic(path)
    assert len(found.records) == 1
    assert found.broken[0].reason.startswith(reason)


def test_a_record_without_what_its_endpoint_needs_has_no_content(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    chat = arrived(1, 0, 0) | {"messages": None, "prompt": "hi"}
    text = arrived(2, 0, 0) | {"endpoint": "/v1/completions", "prompt_token_ids": None}
    path.write_text(lines(chat, text, arrived(3, 0, 0)))
    found = read_traffic(path)
    assert (len(found.records), found.skipped) == (1, {"no content": 2})


def test_files_of_windows_editors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    text = lines(arrived(1, 0, 0), arrived(2, 1, 1)).replace("\n", "\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    found = read_traffic(path)
    assert (len(found.records), found.broken) == (2, [])


def test_compressing_a_file_changes_neither_its_traffic_nor_its_digest(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst"
    plain.write_text(lines(arrived(1, 0, 0), arrived(2, 1, 1)))
    packed.write_bytes(zstandard.compress(plain.read_bytes()))
    assert read_traffic(packed).records == read_traffic(plain).records
    assert read_traffic(packed).digest == read_traffic(plain).digest
    packed.write_bytes(packed.read_bytes()[:-3])
    with pytest.raises(TrafficError, match="cut off"):
        read_traffic(packed)


def test_a_file_finished_while_it_is_read_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(lines(arrived(1, 0, 0)))
    monkeypatch.setattr("replay.source.traffic_files", lambda path: [path / "a.jsonl.part"])
    assert len(read_traffic(tmp_path).records) == 1


def test_a_directory_is_read_as_one_and_limited(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(lines(arrived(3, 5, 1000), arrived(4, 9, 1004)))
    (tmp_path / "a.jsonl.part").write_text(lines(arrived(1, 4, 50), arrived(2, 8, 54)))
    (tmp_path / "other.txt").write_text("no traffic")
    (tmp_path / "folder.jsonl").mkdir()
    found = read_traffic(tmp_path)
    assert [item.offset_s for item in found.records] == [0, 1, 4, 5]
    assert len(found.files) == 2
    assert len(read_traffic(tmp_path, limit=3).records) == 3


def test_a_wall_clock_that_is_set_back_changes_no_offset(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(arrived(1, 100, 7), arrived(2, 101, 8), arrived(3, 62, 9)))
    assert [item.offset_s for item in read_traffic(path).records] == [0, 1, 2]


def test_files_of_two_boots_in_one_are_told_apart_by_the_wall_clock(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(arrived(1, 0, 90_000), arrived(2, 1, 90_001), arrived(3, 120, 5)))
    traffic = read_traffic(path)
    assert [item.offset_s for item in traffic.records] == [0, 1, 1 + LONGEST_PAUSE_S]
    assert traffic.shortened_s == 120 - 1 - LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no traffic at"),
        ("", "nothing to replay in .*: 1 empty files"),
        ("{}\n{\n", r"nothing to replay in .*: 2 broken lines; the first: .*:1: "),
    ],
)
def test_nothing_to_replay_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TrafficError, match=message):
        read_traffic(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrafficError, match="holds no traffic"):
        read_traffic(tmp_path / "empty")


def test_what_the_mirror_writes_can_be_read_while_it_writes(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, share=1.0, key=b"k")
    for number in range(20):
        mirror.offer(record(number, arrival_ns=number * 10**9))
    until(lambda: mirror.counters.written == 20, "all are written")
    assert len(read_traffic(tmp_path).records) == 20
    mirror.close(PATIENCE_S)
    found = read_traffic(tmp_path)
    assert [item.offset_s for item in found.records] == list(range(20))
    assert not found.broken


def test_prompts_become_reproducible_traffic(tmp_path: Path) -> None:
    prompts: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hi 🙂"}], "tenant": "a", "max_tokens": 5},
        {"prompt": "once", "temperature": 0.5, "seed": 9, "conversation": "c"},
    ]
    records = make_records(prompts, model="m", interval_s=0.5)
    write_records(tmp_path / "t.jsonl", records)
    found = read_traffic(tmp_path / "t.jsonl").records
    assert [item.offset_s for item in found] == [0, 0.5]
    assert found[0].record.class_key == "a/chat/-"
    assert found[0].record.sampling.max_tokens == 5
    assert found[1].record.endpoint == "/v1/completions"
    assert found[1].record.sampling.seed == 9
    again = make_records(prompts, model="m")
    assert [item.record.request_id for item in found] == [item.request_id for item in again]
    with pytest.raises(TrafficError, match=r"prompt 1: sampling\.max_tokens"):
        make_records([{"prompt": "x", "max_tokens": 0}], model="m")


def test_idle_time_is_shortened_and_busy_time_is_not(tmp_path: Path) -> None:
    first, second, third = make_records([{"prompt": "a"}] * 3, model="m", interval_s=100.0)
    first.duration_ms = 90_000.0  # in flight until 10 s before the second arrives
    path = tmp_path / "traffic.jsonl"
    write_records(path, [first, second, third])
    traffic = read_traffic(path)
    offsets = [record.offset_s for record in traffic.records]
    assert offsets == pytest.approx([0.0, 95.0, 100.0])
    assert traffic.shortened_s == pytest.approx(5.0 + 95.0)
