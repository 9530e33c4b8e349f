"""`inferloop dashboard` refuses a port in use and hands its settings over."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from capture.settings import Settings
from cli.dashboard import (
    DashboardError,
    check_port,
    dashboard_command,
    dashboard_environment,
)


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError, match=rf"127.0.0.1:{port} .*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)  # any that is free
    with pytest.raises(DashboardError, match="cannot listen on"):
        check_port("192.0.2.1", port)


def test_settings_and_silence(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url="sqlite:///x.sqlite")
    environment = dashboard_environment(settings)
    assert environment["INFERLOOP_HOME"] == str(tmp_path)
    assert environment["INFERLOOP_DATABASE_URL"] == "sqlite:///x.sqlite"
    command = dashboard_command("127.0.0.1", 8601)
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert options["--browser.gatherUsageStats"] == "false"
    assert options["--server.headless"] == "true"
    assert Path(command[4]).is_file()
    assert Path(options["--theme.base"]).is_file()
