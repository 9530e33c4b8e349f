"""The real dashboard on a free port and a Chromium that looks at it, for tests of whole pages."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from capture.settings import Settings
from cli.dashboard import dashboard_command, dashboard_environment
from replay.builds import free_port
from tests.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Locator, Page

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed")


@contextmanager
def dashboard(home: Path) -> Iterator[str]:
    """Address of a dashboard over the data in `home`."""
    process, address = _start(home)
    try:
        yield address
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@contextmanager
def new_page() -> Iterator[Page]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=FLAGS, timeout=PATIENCE_S * 1000
        )
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1200})
            page.set_default_timeout(PATIENCE_S * 1000)
            yield page
        finally:
            browser.close()


def until_idle(page: Page) -> None:
    """Wait until Streamlit has run the whole page: what is shown before may be of the last run."""
    page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for()


def settled_box(found: Locator) -> FloatRect:
    """Where an element is, once it moves no more: what comes above it pushes it down."""

    def look() -> FloatRect | None:
        before = found.bounding_box()
        found.page.wait_for_timeout(200)
        return before if before == found.bounding_box() else None

    box = until(look, "the element has settled")
    assert box is not None
    return box


def _start(home: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Streamlit cannot choose a free port itself: another one is tried if this one is taken."""
    log = home / "streamlit.log"
    for _ in range(5):
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        with log.open("w") as output:
            process = subprocess.Popen(
                dashboard_command("127.0.0.1", port),
                env=dashboard_environment(Settings(home=home)),
                cwd=home,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            until(lambda p=process, a=address: p.poll() is not None or _answers(a), "streamlit")
        except BaseException:
            process.kill()
            raise
        if process.poll() is None:
            return process, address
    raise RuntimeError(f"streamlit does not start: {log.read_text()}")


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/_stcore/health", trust_env=False).text == "ok"
    except httpx.HTTPError:
        return False
