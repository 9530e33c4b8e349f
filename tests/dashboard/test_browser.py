"""A verdict by keyboard on the real page, and that the page never learns what is hidden."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from capture.settings import Settings
from cli.dashboard import dashboard_command, dashboard_environment
from evaluation.models import Label, Presentation
from tests.evaluation.factory import CLASS, NEW_NAME, OLD_NAME, add_run, fresh_sessions, label

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
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

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed")


@pytest.fixture
def sessions(tmp_path: Path) -> sessionmaker[Session]:
    found = fresh_sessions(tmp_path)
    run_id = add_run(found, classes=[CLASS] * 6, unchanged=2, noisy=2)
    label(found, run_id, [-1] * 6, expert="machine:ref", kind="machine")
    return found


@pytest.fixture
def address(tmp_path: Path, sessions: sessionmaker[Session]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "streamlit.log").open("w") as log:
        process = subprocess.Popen(
            dashboard_command("127.0.0.1", port),
            env=dashboard_environment(Settings(home=tmp_path)),
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=20)


def test_judging_by_keyboard_is_stored_and_blind(
    address: str, sessions: sessionmaker[Session]
) -> None:
    from playwright.sync_api import expect, sync_playwright

    received: list[bytes] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page()
        page.on(
            "websocket", lambda ws: ws.on("framereceived", lambda frame: received.append(frame))
        )
        page.goto(f"{address}/judge")
        page.get_by_label("Your name").fill("Ann")
        page.keyboard.press("Enter")
        page.wait_for_selector(".il-answer")
        page.get_by_role("heading", name="Judge what changed").click()
        for key, judged, undo in (("1", 1, True), ("u", 0, False), ("3", 1, True)):
            expect(page.get_by_role("button", name="Right is better")).to_be_enabled()
            page.keyboard.press(key)
            page.get_by_text(f"{judged} judged by you").wait_for()
            expect(page.get_by_role("button", name="Undo")).to_be_enabled(enabled=undo)
        received.append(page.content().encode())
        browser.close()
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


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"streamlit did not listen on port {port} within 60 s")
