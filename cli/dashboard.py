"""`inferloop dashboard`: the latency heat map and the judging page in a browser."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.main import app

if TYPE_CHECKING:
    from capture.settings import Settings

ROOT = Path(__file__).parent.parent / "dashboard"


class DashboardError(Exception):
    """The dashboard could not be started; the message says why."""

    exit_code = 1


@app.command()
def dashboard(
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port to listen on")] = 8501,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
) -> None:
    """Serve the dashboard until Ctrl-C.

    Example: inferloop dashboard --port 8501
    """
    from capture.settings import Settings

    settings = Settings()
    check_port(host, port)
    typer.echo(f"dashboard of {settings.home} on http://{host}:{port} (Ctrl-C ends it)")
    sys.stdout.flush()
    command = dashboard_command(host, port)
    os.execve(command[0], command, dashboard_environment(settings))


def dashboard_command(host: str, port: int) -> list[str]:
    """The command line that serves the dashboard, for whoever starts it as a child."""
    options = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "runner.magicEnabled": "false",
        "server.fileWatcherType": "none",
        "server.maxUploadSize": "1",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "viewer",
        "client.showErrorDetails": "none",
        "theme.base": str(ROOT / "theme.toml"),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "streamlit", "run", str(ROOT / "app.py"), *flags]


def dashboard_environment(settings: Settings) -> dict[str, str]:
    """The environment of the dashboard's process: the settings, whatever its directory."""
    environment = dict(os.environ)
    environment["INFERLOOP_HOME"] = str(settings.home.resolve())
    for name, value in (
        ("INFERLOOP_LAKE_CATALOG", settings.lake_catalog),
        ("INFERLOOP_LAKE_DATA", settings.lake_data),
        ("INFERLOOP_DATABASE_URL", settings.database_url),
    ):
        if value is not None:
            environment[name] = value
    return environment


def check_port(host: str, port: int) -> None:
    """Raise DashboardError unless `port` of `host` can be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise DashboardError(
            f"cannot listen on {host}:{port} ({error.strerror}): "
            "end what uses it or choose another with --port"
        ) from error
