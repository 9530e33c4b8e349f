"""Builds: descriptions, starting and stopping, and failures that say what is wrong."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from replay.builds import BuildSpec, RunningBuild, load_build
from replay.errors import BuildError
from replay.launcher import __file__ as LAUNCHER
from replay.scoring import Given, Score, answer_logprobs, score_answers
from tests.replay.conftest import toy
from tests.waiting import PATIENCE_S, until

Toys = Callable[[str], BuildSpec]
SERVER = """
import http.server, sys, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "%s"}]}' % pathlib.Path("name.txt").read_bytes().strip()
        self.send_response(404 if self.path not in ("/v1/models",) else 200)
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def started(spec: BuildSpec, log: Path) -> RunningBuild:
    async with RunningBuild(spec, log=log) as build:
        return build


def start(spec: BuildSpec, tmp_path: Path) -> RunningBuild:
    return asyncio.run(started(spec, tmp_path / "build.log"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[build]\nname = 'x'", "build: give either command or endpoint"),
        ("[build]\ncommand = 'serve'", r"command has no \{port\}"),
        ("[build]\nendpoint = 'http://h'\nenv = {A = '1'}", "only go with a command"),
        ("[build]\nendpoint = 'ftp://h'", r"build\.endpoint: "),
        ("[build]\ncommand = 's {port}'\nhealth_timeout_s = -1", r"build\.health_timeout_s: "),
        ("[build]\ncommand = 's {port}'\nenv = {A = 1}", r"build\.env\.A: "),
        (
            "[build]\ncommand = 's {port}'\ncomand = 'x'",
            r"unknown key build\.comand; known are name, ",
        ),
        ("[build]\ncommand = 'serve \"a {port}'", "build: No closing quotation"),
        ("[build]\nendpoint = 'http://h:99999'", "a port outside 1 to 65535"),
        ("[build]\nendpoint = 'http://[::1'", "endpoint is no URL"),
        ("[build]\nendpoint = 'http://'", "has no host"),
        ("[build]\nname = \"a\\u001b\"\nendpoint = 'http://h'", "cannot be printed"),
        ('[build]\ncommand = "s {port} \\u0000"', "cannot hold NUL"),
        ("[build]\ncommand = 's {port}'\nenv = {'A=B' = '1'}", "'A=B' cannot be the name"),
        ("[builds]\n", "unknown key builds"),
        ("", r"no table \[build\]"),
        ("[build", "is not TOML"),
    ],
)
def test_a_wrong_description_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "old.toml"
    path.write_text(text)
    with pytest.raises(BuildError, match=message) as caught:
        load_build(path)
    assert str(path) in str(caught.value)


def test_a_description_has_defaults(tmp_path: Path) -> None:
    path = tmp_path / "int8.toml"
    path.write_text("[build]\ncommand = 'serve --port {port}'\nworkdir = 'sub'\n")
    spec = load_build(path)
    assert (spec.name, spec.workdir) == ("int8", tmp_path / "sub")
    with pytest.raises(BuildError, match="cannot read the build file"):
        load_build(tmp_path / "missing.toml")


def test_a_build_that_ends_at_once_shows_its_last_words(tmp_path: Path) -> None:
    program = "print('line ' * 3); raise SystemExit('no such weights: x.gguf')"
    command = f'{sys.executable} -c "{program}" {{port}}'
    spec = BuildSpec(name="b", command=command, health_timeout_s=3600)
    with pytest.raises(BuildError, match="build b ended with exit code 1") as caught:
        start(spec, tmp_path)
    assert "no such weights" in str(caught.value)


@pytest.mark.parametrize("program", ["surely-no-such-program", "/nowhere/serve", "./serve", "/etc"])
def test_a_missing_program_is_said(tmp_path: Path, program: str) -> None:
    with pytest.raises(BuildError, match=f"build b: there is no program '{program}'"):
        start(BuildSpec(name="b", command=f"{program} {{port}}"), tmp_path)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (b'{"data": ["x"]}', "does not speak the OpenAI API"),
        (b"[" * 100_000, "does not speak the OpenAI API"),
        (b'{"data": [{"id": "m", "meta": NaN}]}', "does not speak the OpenAI API"),
        (b'{"data": [{"id": "\\u001b[31m"}]}', "serves \ufffd\\[31m, not toy"),
    ],
)
def test_odd_answers_about_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: bytes, problem: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        found = request.url.path in ("/health", "/v1/models")
        return httpx.Response(200 if found else 404, content=model)

    build = RunningBuild(
        BuildSpec(name="b", endpoint="http://127.0.0.1", model="toy"), log=tmp_path / "log"
    )

    def client(timeout: httpx.Timeout) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=build.base_url, timeout=timeout, transport=httpx.MockTransport(answer)
        )

    monkeypatch.setattr(build, "open_http", client)

    async def enter() -> None:
        async with build:
            pass

    with pytest.raises(BuildError, match=problem):
        asyncio.run(enter())


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = BuildSpec(name="b", command="true {port}")
    with pytest.raises(BuildError, match="build b cannot be started with its log in"):
        asyncio.run(started(spec, tmp_path / "file" / "log"))


def test_a_log_cannot_drive_the_terminal(tmp_path: Path) -> None:
    program = r"print('\\33[31mred'); raise SystemExit(3)"
    spec = BuildSpec(name="b", command=f'{sys.executable} -c "{program}" {{port}}')
    with pytest.raises(BuildError, match="red") as caught:
        start(spec, tmp_path)
    assert "\x1b" not in str(caught.value)


def test_a_silent_endpoint_times_out_with_the_reason(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen: the port is nobody else's either
        port = silent.getsockname()[1]
        spec = BuildSpec(name="b", endpoint=f"http://127.0.0.1:{port}", health_timeout_s=0.3)
        with pytest.raises(BuildError, match=r"not healthy after 0\.3 s \(ConnectError"):
            start(spec, tmp_path)


def test_an_endpoint_gets_its_key_from_the_environment(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = toys("locked").model_copy(update={"api_key_env": "TOY_KEY"})
    monkeypatch.setenv("TOY_KEY", "letmein")
    assert start(spec, tmp_path).fingerprint == "toy-locked"
    assert score_answers(spec, [Given([1], [2])], log=tmp_path / "log")[0].error is None
    monkeypatch.setenv("TOY_KEY", "wrong")
    with pytest.raises(BuildError, match="status 401"):
        start(spec, tmp_path)
    monkeypatch.setenv("TOY_KEY", "letmein\n")
    with pytest.raises(BuildError, match="variable TOY_KEY holds") as caught:
        start(spec, tmp_path)
    assert "letmein" not in str(caught.value)
    monkeypatch.delenv("TOY_KEY")
    with pytest.raises(BuildError, match="variable TOY_KEY"):
        start(spec, tmp_path)


def test_a_connection_that_was_idle_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.builds.REUSE_S", 0.1)
    opened = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while await reader.read(65536):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        build = RunningBuild(
            BuildSpec(name="b", endpoint=f"http://127.0.0.1:{port}"), log=tmp_path / "log"
        )
        build.base_url = f"http://127.0.0.1:{port}"
        async with server, build.open_http(httpx.Timeout(PATIENCE_S)) as http:
            await http.get("/")
            await asyncio.sleep(0.2)
            await http.get("/")

    asyncio.run(ask())
    assert opened == 2


def test_an_unknown_model_is_refused(tmp_path: Path, toys: Toys) -> None:
    spec = toys("plain").model_copy(update={"model": "gpt"})
    with pytest.raises(BuildError, match="serves toy, not gpt"):
        start(spec, tmp_path)


def test_fingerprints_come_from_the_build_or_its_models(tmp_path: Path, toys: Toys) -> None:
    plain = start(toys("plain"), tmp_path)
    assert (plain.fingerprint, plain.components) == ("toy-plain", {"faults": []})
    foreign = start(toys("foreign"), tmp_path)
    assert len(foreign.fingerprint) == 32
    assert foreign.components == {"name": "foreign", "models": [{"id": "toy"}]}
    assert start(toys("foreign"), tmp_path).fingerprint == foreign.fingerprint
    twin = toys("foreign").model_copy(update={"name": "twin"})
    assert start(twin, tmp_path).fingerprint != foreign.fingerprint


def test_a_worktree_runs_another_revision_and_is_removed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t.example")
        command = ["git", "-C", str(repository), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (repository / "server.py").write_text(SERVER)
    for name in ("first", "second"):
        (repository / "name.txt").write_text(name)
        git("add", ".")
        git("commit", "-q", "-m", name)
    spec = BuildSpec(
        name="w",
        command=f"{sys.executable} server.py {{port}}",
        workdir=repository,
        worktree="HEAD~1",
    )
    assert start(spec, tmp_path).model == "first"
    assert start(spec.model_copy(update={"worktree": None}), tmp_path).model == "second"
    assert len(git("worktree", "list").splitlines()) == 1
    with pytest.raises(BuildError, match="worktree no-such-revision"):
        start(spec.model_copy(update={"worktree": "no-such-revision"}), tmp_path)


@pytest.mark.kill
def test_stopping_a_build_ends_all_its_descendants(tmp_path: Path) -> None:
    marker = str(10_000_000 + os.getpid())  # seconds that nobody else sleeps
    script = (
        f"trap '' TERM; sleep {marker} & setsid sleep {marker} & "
        f"(setsid bash -c \"trap '' TERM; sleep {marker}; sleep {marker}\" &); wait"
    )
    launch = [sys.executable, "-I", "-S", "-c", FAST_LAUNCHER, LAUNCHER, "bash", "-c", script]
    process = subprocess.Popen(launch, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        until(lambda: len(_sleepers(marker)) == 3, "all are there", poll_s=0.05)
        process.stdin.close()
        process.wait(PATIENCE_S)
    finally:
        process.stdin.close()
    assert not _sleepers(marker)


FAST_LAUNCHER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("launcher", sys.argv[1])
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
launcher.GRACE_S = 0.5
sys.exit(launcher.main(sys.argv[2:]))
"""


def _sleepers(marker: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", marker.encode()]:
            found.append(entry.parent.name)
    return found


def test_answers_are_scored_token_by_token(tmp_path: Path, toys: Toys) -> None:
    given = [Given([1, 2, 3], [4, 5]), Given([1], []), Given([], [4, 5]), Given([1, 2, 3], [4, 5])]
    scores = score_answers(toys("plain"), given, log=tmp_path / "log")
    assert len(scores[0].logprobs) == 2
    assert scores[0].total == pytest.approx(sum(scores[0].logprobs))
    assert scores[0].mean == pytest.approx(scores[0].total / 2)
    assert scores[0] == scores[3]
    assert scores[1] == Score([])
    assert scores[1].mean is None
    assert "without a prompt" in str(scores[2].error)


def test_a_command_build_scores_too_and_errors_are_per_answer(tmp_path: Path) -> None:
    scores = score_answers(toy("errors"), [Given([1], [2])] * 4, log=tmp_path / "log")
    assert [score.error for score in scores].count("the toy is broken") == 1


def test_prompt_logprobs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 entries for 3 tokens"):
        answer_logprobs([None, {"5": {"logprob": -1.0}}], Given([1], [5, 6]))
    with pytest.raises(ValueError, match="log-probability of token 5 is nan"):
        answer_logprobs([None, {"5": {"logprob": float("nan")}}], Given([1], [5]))
