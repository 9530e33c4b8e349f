"""The demo's story: which commands run in which order, and what is shown between them.

Each step is a command of the product, run as a user would run it and shown before it runs. Not
for logic of its own: whatever a step needs is a command's or a library's.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from capture.lake import open_connection
from capture.settings import Settings
from cli.demo import queries
from cli.demo.client import DemoError, load_prompts, send
from evaluation import feedback
from replay import launcher
from replay.builds import BuildSpec, RunningBuild
from replay.database import now

INTERVAL_S = 0.4
"""Between two prompts: fast enough that requests share steps."""

BURST_RUNNING = 2
"""Requests that run at a time during the bursts: the others have to wait."""

BURST_TOKENS = 24
SHOWN_DIFFS = 3
MIN_LABELS = 4
"""Labels a class needs before the demo's policy may demote it; with CONFIDENCE far below the
command's defaults, because the demo's classes are small."""

CONFIDENCE = 0.8
OPERATORS_CHOICE = "borealis/list"
POLICY_RELOAD_S = 2.0
VISIBLE_WITHIN_S = 30.0
"""How long to wait for the collector to commit what was served."""

GATE_MEANINGS = {0: "pass", 1: "fail", 2: "not enough evidence", 3: "invalid run"}


class Scenario:
    """One run of the demo: `limit` cuts the prompts."""

    def __init__(self, settings: Settings, limit: int | None) -> None:
        self._settings = settings
        self._prompts = load_prompts(limit)
        self._console = Console()
        self._directory = settings.home / "demo"

    async def run(self) -> None:
        """All steps but the dashboard. Raises DemoError when one of them fails."""
        began = time.monotonic()
        self._copy_build_files()
        with self._collector():
            self._replay(await self._serve_and_trace())
            self._judge()
            await self._feed_back()
        self._title(f"Done in {time.monotonic() - began:.0f} s. Try next:")
        if shutil.which("inferloop") is None:
            activate = Path(sys.prefix) / "bin" / "activate"
            self._console.print(Text(f"$ source {activate}", style="bold green"), soft_wrap=True)
        for command in (
            ["why", "--slowest", "3"],
            ["sql", queries.UNSURE_TOKENS],
            ["label", "next", "--expert", "you"],
            ["gate", "--markdown", "gate.md"],
            ["feedback", "show"],
            ["dashboard"],
        ):
            self._show_command(command)

    def serve_dashboard(self) -> None:
        """Serve the dashboard until Ctrl-C."""
        self._title("The dashboard, until Ctrl-C")
        with suppress(KeyboardInterrupt):
            self._command("dashboard", may_fail=True)

    # -- the steps ----------------------------------------------------------------------------

    async def _serve_and_trace(self) -> Path:
        """Serve the old build with trace and mirror on; returns the traffic file it leaves."""
        self._title("1. Serve: every token goes into the trace, every request is kept")
        before = set(self._settings.traffic.glob("*.jsonl*"))
        async with self._server("--weights int8 --mirror-share 1") as server:
            began = now()
            with self._bar("sending prompts", len(self._prompts)) as advance:
                await send(server, self._prompts, INTERVAL_S, advance)
            self._title("2. Query the trace in SQL, while engine and collector run")
            await self._until_visible(began, len(self._prompts))
            self._command("sql", queries.CLASSES)
            self._command("sql", queries.SLOW_TOKENS)
        written = sorted(set(self._settings.traffic.glob("*.jsonl*")) - before)
        if not written:
            raise DemoError(f"the mirror wrote no traffic file in {self._settings.traffic}")
        return written[-1]

    def _replay(self, traffic: Path) -> None:
        self._title("3. Replay that traffic: the old build twice, the new one once")
        old, new = self._build_file("old"), self._build_file("new")
        replay = ("replay", "--old", old, "--new", new, "--traffic", str(traffic))
        if self._command(*replay, may_fail=True):
            self._say("Something else kept this machine busy, or so it seems: once more.")
            self._command(*replay)
        self._command("replay", "show", "--diffs", str(SHOWN_DIFFS))

    def _judge(self) -> None:
        self._title("4. Judge: machine labels by a float32 referee, never taken for an expert's")
        self._command("label", "prelabel", "--referee", self._build_file("referee"))
        self._title("5. Gate: may the new build be released?")
        report = self._directory / "gate"
        code = self._command(
            "gate", "--markdown", f"{report}.md", "--junit", f"{report}.xml", may_fail=True
        )
        if code not in GATE_MEANINGS:
            raise DemoError(f"the gate ended with exit code {code}")
        self._say(f"exit code {code}: {GATE_MEANINGS[code]}")

    async def _feed_back(self) -> None:
        """Publish the policy to a running new build; compare a burst before with one after."""
        self._title("6. Feed back: the scheduler serves harmed classes later")
        prompts = [
            prompt | {"max_tokens": min(BURST_TOKENS, prompt["max_tokens"])}
            for prompt in self._prompts
        ]
        random.Random(1).shuffle(prompts)  # no class is early or late by its place in the file
        feedback.disable(self._settings.policy_file, now())
        options = f"--weights int4 --kv-block 32 --mirror-share 0 --max-running {BURST_RUNNING}"
        async with self._server(options) as server:
            before = now()
            with self._bar("a burst without the policy", len(prompts)) as advance:
                await send(server, prompts, 0.0, advance)
            self._publish()
            await asyncio.sleep(POLICY_RELOAD_S)
            after = now()
            with self._bar("the same burst under the policy", len(prompts)) as advance:
                await send(server, prompts, 0.0, advance)
            await self._until_visible(before, 2 * len(prompts))
        self._command("sql", queries.POLICY_EVENTS)
        self._command("sql", queries.waits(before, after))
        self._check_waits(after, len(prompts))

    def _publish(self) -> None:
        """The policy that the machine labels justify; where they demote nothing, an operator's."""
        self._command(
            "feedback", "publish", "--basis", "machine", "--enable",
            "--min-labels", str(MIN_LABELS), "--confidence", str(CONFIDENCE),
        )  # fmt: skip
        policy = feedback.read_policy(self._settings.policy_file)
        if policy is not None and any(entry.adjustment < 0 for entry in policy.classes.values()):
            return
        self._say(
            "No class is known to be harmed, so the labels demote none. To show what a demotion "
            "does, an operator demotes one by hand:"
        )
        self._command("feedback", "demote", OPERATORS_CHOICE, "--by", "20")

    def _check_waits(self, since: datetime, sent: int) -> None:
        """Raise DemoError unless the demoted waited longer than the others and all were served."""
        with open_connection(self._settings) as lake:
            demoted, others, served = lake.execute(queries.burst(since)).fetchall()[0]
        if served != sent:
            raise DemoError(f"{sent - served} of {sent} requests of the burst were not served")
        if demoted is None or demoted <= others:
            raise DemoError(f"demoted classes waited {demoted} ms, the others {others} ms")
        self._say(
            f"Demoted classes waited {demoted / others:.1f} times as long as the others (median), "
            f"and all {served} requests were served: nobody starves."
        )

    # -- what the steps share -----------------------------------------------------------------

    def _copy_build_files(self) -> None:
        """Put the build files where the user can read, change and use them."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in ("old", "new", "referee"):
            text = files("cli.demo").joinpath(f"{name}.toml").read_text(encoding="utf-8")
            Path(self._build_file(name)).write_text(text, encoding="utf-8")

    def _build_file(self, name: str) -> str:
        return str(self._directory / f"{name}.toml")

    @contextmanager
    def _collector(self) -> Iterator[None]:
        """A collector that ends with the demo, however that ends."""
        self._show_command(["collect"], background=True)
        log = self._directory / "collect.log"
        command = [sys.executable, "-I", "-S", str(launcher.__file__), *_inferloop("collect")]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
        try:
            yield
        finally:
            ended = process.poll() is not None
            process.communicate()
            if ended:
                self._say(f"the collector ended early; its log: {log}")

    @asynccontextmanager
    async def _server(self, options: str) -> AsyncIterator[RunningBuild]:
        command = f"{shlex.join(_inferloop('serve'))} --port {{port}} {options}"
        spec = BuildSpec(name="demo", command=command)
        self._show_command(["serve", *shlex.split(options)], background=True)
        async with RunningBuild(spec, log=self._directory / "serve.log") as server:
            yield server

    async def _until_visible(self, since: datetime, requests: int) -> None:
        """Wait until the lake has the end of so many requests that arrived after `since`."""
        deadline = time.monotonic() + VISIBLE_WITHIN_S
        seen = 0
        while seen < requests and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            with open_connection(self._settings) as lake:
                seen = lake.execute(queries.ended(since)).fetchall()[0][0]
        if seen < requests:
            raise DemoError(
                f"{seen} of {requests} requests reached the lake within {VISIBLE_WITHIN_S:g} s: "
                f"see {self._directory / 'collect.log'}"
            )

    def _command(self, *arguments: str, may_fail: bool = False) -> int:
        """Show and run a command; its exit code. Raises DemoError when it is not 0."""
        self._show_command(list(arguments))
        code = subprocess.run(_inferloop(*arguments), check=False).returncode
        self._console.print()
        if code and not may_fail:
            raise DemoError(
                f"`inferloop {arguments[0]}` ended with exit code {code}, and says above why; "
                "the demo needs two cores for itself: on a busy machine run it again later"
            )
        return code

    def _show_command(self, arguments: list[str], *, background: bool = False) -> None:
        words = ["inferloop", *map(_quoted, arguments), *(["&"] if background else [])]
        line = " ".join(words)
        self._console.print(Text(f"$ {line}", style="bold green"), soft_wrap=True)

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.rule(Text(text, style="bold"), align="left")

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._console.print()

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)


def _quoted(argument: str) -> str:
    """As a person would quote it in a shell: SQL has single quotes of its own."""
    if "'" in argument and not set(argument) & set('"$`\\!'):
        return f'"{argument}"'
    return shlex.quote(argument)


def _inferloop(*arguments: str) -> list[str]:
    """The command line of this very installation, whether or not it is on the PATH."""
    return [sys.executable, "-P", "-m", "cli", *arguments]
