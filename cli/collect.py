"""`inferloop collect`: the collector as a process, with its progress on the terminal."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from capture.collecting.systemd import notify
from cli.main import app

if TYPE_CHECKING:
    from rich.console import Console

    from capture.collecting.follower import Status

STATUS_S = 10.0


@app.command()
def collect(
    once: Annotated[
        bool, typer.Option("--once", help="Read what the rings hold now, commit it and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Warnings and errors only.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Serve /metrics (Prometheus) and /health on 127.0.0.1:PORT."
        ),
    ] = None,
) -> None:
    """Follow the engines' trace rings and commit every token to the trace lake.

    Runs until Ctrl-C or SIGTERM, then drains. Engines may start, stop and
    crash meanwhile; a crash leaves a report and the ring in <home>/crashes.
    Where rings and lake are: INFERLOOP_HOME, INFERLOOP_RING_DIR,
    INFERLOOP_LAKE_CATALOG, INFERLOOP_LAKE_DATA.
    How long rows are kept: INFERLOOP_RETENTION_DAYS, INFERLOOP_LAKE_MAX_GIB.

    Example:  inferloop collect --metrics-port 9464
    """
    from rich.console import Console

    from capture.collecting.retention import Limits
    from capture.collector import Collector
    from capture.lake import LakePlace
    from capture.settings import Settings

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    _log_to(console, quiet)
    _allow_open_files()
    settings = Settings()
    place = LakePlace.from_settings(settings)
    stop = threading.Event()
    progress = Progress(console, quiet=quiet)
    watchers = [progress.show, _supervision(stop)]

    def started() -> None:
        notify("READY=1")
        if not quiet:
            console.print(f"collecting from {settings.rings} into {place.described}")

    with ExitStack() as stack:
        _stop_on_signals(stack, stop)
        port = metrics_port or settings.collector_metrics_port
        if port is not None:
            watchers.append(_serve_metrics(stack, settings.collector_metrics_host, port))
        collector = Collector(
            place,
            ring_dir=settings.rings,
            crash_dir=settings.home / "crashes",
            stop=stop,
            on_status=lambda status: _tell(watchers, status),
            on_start=started,
            limits=Limits.from_settings(settings),
        )
        with progress:
            status = collector.run(once=once)
    if not quiet:
        console.print(f"stopped: {described(status)}")


def _allow_open_files() -> None:
    """As many as this user may have: two for each ring, and those of the lake."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _stop_on_signals(stack: ExitStack, stop: threading.Event) -> None:
    """Let SIGTERM and Ctrl-C set `stop` until the stack unwinds."""
    for number in (signal.SIGTERM, signal.SIGINT):
        stack.callback(signal.signal, number, signal.signal(number, lambda *_: stop.set()))


def _tell(watchers: list[Callable[[Status], None]], status: Status) -> None:
    for watch in watchers:
        watch(status)


def _log_to(console: Console, quiet: bool) -> None:
    from rich.logging import RichHandler

    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(message)s" if console.is_terminal else "%(asctime)s %(levelname)s %(message)s",
        handlers=[RichHandler(console=console, show_path=False)] if console.is_terminal else None,
    )


def _serve_metrics(stack: ExitStack, host: str, port: int) -> Callable[[Status], None]:
    """Serve metrics until the stack unwinds; what to tell each status to."""
    from capture.collecting.collector_metrics import CollectorMetrics, MetricsServer

    metrics = CollectorMetrics()
    stack.callback(MetricsServer(metrics, host, port).close)
    return metrics.watch


def _supervision(stop: threading.Event) -> Callable[[Status], None]:
    """Tell systemd, if it asked, that the collector lives, what it does and that it stops."""
    stopping: list[bool] = []

    def tell(status: Status) -> None:
        if stop.is_set() and not stopping:
            stopping.append(True)
            notify("STOPPING=1")
        notify("WATCHDOG=1", f"STATUS={described(status)}")

    return tell


class Progress:
    """A live line on a terminal; a line every ten seconds elsewhere, and while the process is in
    the background, where a live line would be drawn over the prompt of the shell."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        from rich.live import Live

        self._line = Live(console=console, auto_refresh=False, transient=True)
        self._may_draw = console.is_terminal and not quiet and _stdin_is_terminal()
        self._quiet = quiet
        self._console = console
        self._shown_s = 0.0
        self._tokens = 0
        self._seen: tuple[int, str | None] = (0, None)
        self._since_s = time.monotonic()

    def __enter__(self) -> None:
        if self._may_draw:
            signal.signal(signal.SIGTSTP, self._suspend)

    def __exit__(self, *_: object) -> None:
        if self._may_draw:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._line.stop()

    def show(self, status: Status) -> None:
        from rich.text import Text

        now = time.monotonic()
        seen = (status.frames, status.waiting_for)
        idle = seen == self._seen or now - self._shown_s < STATUS_S
        draws = self._may_draw and _in_foreground()
        if draws != self._line.is_started:
            (self._line.start if draws else self._line.stop)()
        if self._quiet or (not draws and idle):
            return
        self._seen = seen
        rate = (status.tokens - self._tokens) / max(now - self._since_s, 1e-9)
        self._shown_s = self._since_s = now
        self._tokens = status.tokens
        text = f"{described(status)}, {rate:,.0f} tokens/s"
        if draws:
            self._line.update(Text(text), refresh=True)
        else:
            self._console.print(text, markup=False)

    def _suspend(self, *_: object) -> None:
        """Ctrl-Z: the line goes before the shell's prompt comes, for `bg` may follow."""
        self._line.stop()
        os.kill(os.getpid(), signal.SIGSTOP)


def _stdin_is_terminal() -> bool:
    """A script's `inferloop collect &` is in the script's own process group; it can be told by its
    standard input, which a shell without job control takes away."""
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):  # closed
        return False


def _in_foreground() -> bool:
    """Whether the terminal of standard error is this process's to draw on now."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True


def described(status: Status) -> str:
    """The collector's state in one line."""
    if status.waiting_for is not None:
        return f"waiting for the lake: {status.waiting_for}"
    rings = "1 ring" if status.rings == 1 else f"{status.rings} rings"
    text = (
        f"{rings}, {status.tokens:,} tokens in {status.frames:,} frames, "
        f"lost {status.lost_tokens:,} tokens, lag {status.lag_bytes >> 10:,} KiB, "
        f"commits {status.commits:,} (last {status.last_commit_s * 1000:.0f} ms, "
        f"longest {status.longest_commit_s * 1000:.0f} ms)"
    )
    return f"{text}, {status.crashes} engine crashes" if status.crashes else text
