"""Marks by HTTP: who may set one, and what is not taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.marks import BURST, MAX_MARK_BYTES, MarkRefused, Marks
from tests.engine.live_server import live_server

JSON = "application/json"


def take(marks: Marks, text: Any = "deploy 7", *, client: str | None = "127.0.0.1") -> str:
    return marks.take(json.dumps({"text": text}).encode(), client=client, content_type=JSON)


def test_a_mark_is_written_as_it_was_given() -> None:
    written: list[str] = []
    marks = Marks(written.append, from_anywhere=False)
    assert take(marks, "  déploiement 7 ✓ ") == "déploiement 7 ✓"
    assert written == ["déploiement 7 ✓"]


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_this_machine_may_always_set_marks(client: str) -> None:
    written: list[str] = []
    take(Marks(written.append, from_anywhere=False), client=client)
    assert written


@pytest.mark.parametrize(
    "client", ["10.0.0.7", "2001:db8::1", "::ffff:10.0.0.7", "testclient", None]
)
def test_other_machines_may_when_allowed(client: str | None) -> None:
    written: list[str] = []
    with pytest.raises(MarkRefused, match="this machine only") as caught:
        take(Marks(written.append, from_anywhere=False), client=client)
    assert caught.value.status == 403
    assert written == []
    take(Marks(written.append, from_anywhere=True), client=client)
    assert written


@pytest.mark.parametrize("text", ["", "   ", "two\nlines", "\x1b[31mred", "nul\0", 7, None, ["a"]])
def test_what_is_no_line_of_text_is_refused(text: object) -> None:
    written: list[str] = []
    with pytest.raises(MarkRefused) as caught:
        take(Marks(written.append, from_anywhere=False), text)
    assert caught.value.status == 400
    assert written == []


@pytest.mark.parametrize("body", [b"", b"deploy 7", b"[]", b'{"text": "a", "b": 1}', b"\xff\xfe"])
def test_other_bodies_are_refused_with_an_example(body: bytes) -> None:
    marks = Marks(lambda _: None, from_anywhere=False)
    with pytest.raises(MarkRefused, match="deploy 7") as caught:
        marks.take(body, client="127.0.0.1", content_type=JSON)
    assert caught.value.status == 400


def test_length_is_bounded_in_bytes() -> None:
    written: list[str] = []
    marks = Marks(written.append, from_anywhere=False)
    take(marks, "é" * (MAX_MARK_BYTES // 2))
    take(marks, "\U0001f469\u200d\U0001f680 launched")
    with pytest.raises(MarkRefused, match=f"{MAX_MARK_BYTES + 2} bytes, the limit is"):
        take(marks, "é" * (MAX_MARK_BYTES // 2 + 1))


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_web_page_cannot_set_marks_behind_its_readers_back(kind: str) -> None:
    marks = Marks(lambda _: None, from_anywhere=True)
    with pytest.raises(MarkRefused) as caught:
        marks.take(b'{"text": "deploy 7"}', client="127.0.0.1", content_type=kind)
    assert caught.value.status == 415


def test_a_flood_of_marks_is_refused() -> None:
    written: list[str] = []
    marks = Marks(written.append, from_anywhere=False)
    for _ in range(BURST):
        take(marks)
    with pytest.raises(MarkRefused) as caught:
        take(marks)
    assert caught.value.status == 429
    assert len(written) == BURST


def test_a_server_that_does_not_trace_says_so() -> None:
    with live_server() as server:
        answer = server.client.post("/inferloop/marks", json={"text": "deploy 7"})
        assert answer.status_code == 409
        assert "--no-trace" in answer.json()["error"]["message"]
        assert server.client.get("/inferloop/marks").status_code == 405
        huge = server.client.post("/inferloop/marks", content=b"x" * (5 << 20))
        assert huge.status_code == 413
