"""The real dashboard on a free port and a Chromium that looks at it, for tests of whole pages."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from capture.settings import Settings
from cli.dashboard import dashboard_command, dashboard_environment

if TYPE_CHECKING:
    from playwright.sync_api import Page

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (home / "streamlit.log").open("w") as log:
        process = subprocess.Popen(
            dashboard_command("127.0.0.1", port),
            env=dashboard_environment(Settings(home=home)),
            cwd=home,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=20)


@contextmanager
def new_page() -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            yield browser.new_page(viewport={"width": 1400, "height": 1200})
        finally:
            browser.close()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"streamlit did not listen on port {port} within 60 s")
