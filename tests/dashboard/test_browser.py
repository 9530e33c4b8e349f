"""A verdict by keyboard on the real page, and that the page never learns what is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from evaluation.models import Label, Presentation
from tests.dashboard.browser import dashboard, needs_chromium, new_page, until_idle
from tests.evaluation.factory import CLASS, NEW_NAME, OLD_NAME, add_run, fresh_sessions, label

SECRETS = [
    OLD_NAME,
    NEW_NAME,
    OLD_NAME.encode().hex(),
    NEW_NAME.encode().hex(),
    "new_side",
    "old_a",
    "old_b",
    "machine:",
    "Machine label",
    "likelihood",
    CLASS,
]

pytestmark = needs_chromium


@pytest.fixture
def sessions(tmp_path: Path) -> sessionmaker[Session]:
    found = fresh_sessions(tmp_path)
    run_id = add_run(found, classes=[CLASS] * 6, unchanged=2, noisy=2)
    label(found, run_id, [-1] * 6, expert="machine:ref", kind="machine")
    return found


@pytest.fixture
def address(tmp_path: Path, sessions: sessionmaker[Session]) -> Iterator[str]:
    with dashboard(tmp_path) as found:
        yield found


def test_judging_by_keyboard_is_stored_and_blind(
    address: str, sessions: sessionmaker[Session]
) -> None:
    from playwright.sync_api import expect

    received: list[bytes] = []
    with new_page() as page:
        page.on(
            "websocket", lambda ws: ws.on("framereceived", lambda frame: received.append(frame))
        )
        page.goto(f"{address}/judge")
        page.get_by_label("Your name").fill("Ann")
        page.keyboard.press("Enter")
        page.wait_for_selector(".il-answer")
        page.get_by_role("heading", name="Judge what changed").click()
        for key, judged, undo in (("1", 1, True), ("u", 0, False), ("3", 1, True)):
            until_idle(page)
            expect(page.get_by_role("button", name="Right is better")).to_be_enabled()
            page.keyboard.press(key)
            page.get_by_text(f"{judged} judged by you").wait_for()
            expect(page.get_by_role("button", name="Undo")).to_be_enabled(enabled=undo)
        received.append(page.content().encode())
    with sessions() as session:
        stored = session.scalars(select(Label).where(Label.expert.has(name="Ann"))).one()
        shown = session.scalars(
            select(Presentation).where(Presentation.diff_id == stored.diff_id)
        ).one()
    assert stored.value == (1 if shown.new_side == "right" else -1)
    assert stored.seconds is not None
    payload = b"".join(part if isinstance(part, bytes) else part.encode() for part in received)
    assert payload.count(b"is forty") >= 4
    for secret in SECRETS:
        assert secret.encode() not in payload
