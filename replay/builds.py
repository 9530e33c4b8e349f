"""Builds of an engine: how they are described (TOML), started, watched and stopped.

A build is a command that serves the OpenAI API on a given port, or the endpoint of a server that
runs already. Nothing here knows what the engine is; see `replay.launcher` for how its processes
are kept from outliving the replay.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from replay import launcher
from replay.errors import BuildError
from replay.health import Health, until_healthy
from replay.stream import UNREADABLE, one_line

LOG_LINES = 20
UNREACHABLE_S = 5.0
"""An endpoint is a server that runs already: when it takes no connection for so long, it is not
there. A command, and an endpoint whose file gives `health_timeout_s`, may take all that time."""
REUSE_S = 2.0
"""An idle connection is used again for so long: servers close theirs after 5 s (uvicorn) or more,
and a request that meets its end fails."""
STOP_TIMEOUT_S = launcher.GRACE_S + 5.0
NEUTRAL_ENVIRONMENT = {"INFERLOOP_MIRROR_SHARE": "0"}
"""Replayed requests must not be mirrored into the traffic they came from."""


class BuildSpec(BaseModel):
    """How to get at a build: `command` (with {port}) or `endpoint`, exactly one of them.

    `worktree` is a git revision of the repository at `workdir`: the command then runs in a fresh
    worktree of it. `env` is added to the environment. `model` defaults to the first one served.
    `api_key_env` names the environment variable that holds the server's API key.
    `health_timeout_s` bounds the wait for a healthy answer; see also `unreachable_s`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    command: str | None = None
    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    model: str | None = None
    api_key_env: str | None = None
    health_timeout_s: float = Field(default=120.0, gt=0)
    env: dict[str, str] = {}
    workdir: Path | None = None
    worktree: str | None = Field(default=None, pattern=r"^[^-]")

    @property
    def unreachable_s(self) -> float:
        """How long the build may take no connection before it is given up."""
        if self.endpoint is not None and "health_timeout_s" not in self.model_fields_set:
            return UNREACHABLE_S
        return self.health_timeout_s

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if not self.name.isprintable():
            raise ValueError(f"name {self.name!r} has characters that cannot be printed")
        if (self.command is None) == (self.endpoint is None):
            raise ValueError("give either command or endpoint")
        if self.command is not None:
            self._check_command(self.command)
        if self.endpoint is not None:
            self._check_endpoint(self.endpoint)
        return self

    def _check_command(self, command: str) -> None:
        if "{port}" not in command:
            raise ValueError("command has no {port}: the replay chooses where the build listens")
        shlex.split(command)
        for text in (command, str(self.workdir), *self.env, *self.env.values()):
            if "\x00" in text:
                raise ValueError("a command, its workdir and its env cannot hold NUL characters")
        wrong = [name for name in self.env if not name or "=" in name]
        if wrong:
            raise ValueError(f"env: {wrong[0]!r} cannot be the name of a variable")

    def _check_endpoint(self, endpoint: str) -> None:
        if self.env or self.worktree or self.workdir:
            raise ValueError("env, workdir and worktree only go with a command")
        try:
            url = httpx.URL(endpoint)
        except httpx.InvalidURL as error:
            raise ValueError(f"endpoint is no URL: {error}") from error
        if not url.host or not 0 < (url.port or 80) < 65536:
            raise ValueError(f"endpoint {endpoint!r} has no host, or a port outside 1 to 65535")


def load_build(path: Path) -> BuildSpec:
    """Read a build's TOML file, table `[build]`; raises BuildError naming file, key and problem.

    `name` defaults to the file's name, and relative `workdir`s start at the file's directory.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildError(f"cannot read the build file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BuildError(f"{path} is not TOML: {error}") from error
    unknown = sorted(set(document) - {"build"})
    table = document.get("build")
    if unknown or not isinstance(table, dict):
        wrong = f"unknown key {unknown[0]}" if unknown else "no table [build]"
        raise BuildError(f"{path}: {wrong}; a build file has one table, [build]")
    try:
        spec = BuildSpec.model_validate({"name": path.stem} | table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("build", *map(str, first["loc"])))
        problem = f"{key}: {first['msg'].removeprefix('Value error, ')}"
        if first["type"] == "extra_forbidden":
            problem = f"unknown key {key}; known are {', '.join(BuildSpec.model_fields)}"
        raise BuildError(f"{path}: {problem}") from error
    if spec.workdir is not None:
        spec = spec.model_copy(update={"workdir": path.parent / spec.workdir})
    return spec


class RunningBuild:
    """A build that answers. `async with RunningBuild(spec, log=...) as build: ...`

    Entering starts the command (if any) and waits until it is healthy; leaving stops it, SIGTERM
    first. `base_url` has no trailing slash; `fingerprint` and `components` come from
    /inferloop/build, or for other engines from what they say about their models. Entering raises
    BuildError with the end of the command's log when the build does not become healthy.
    """

    def __init__(self, spec: BuildSpec, *, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.base_url = ""
        self.model = spec.model or ""
        self.fingerprint = ""
        self.components: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._worktree: Path | None = None

    async def __aenter__(self) -> Self:
        try:
            if self.spec.command is not None:
                port = free_port()
                self.base_url = f"http://127.0.0.1:{port}"
                self._start(port)
            else:
                self.base_url = str(self.spec.endpoint).rstrip("/").removesuffix("/v1")
            async with self.open_http(httpx.Timeout(10.0, connect=UNREACHABLE_S)) as client:
                await self._wait_until_healthy(client)
                await self._identify(client)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    def open_http(self, timeout: httpx.Timeout) -> httpx.AsyncClient:
        """A client for `base_url`, with the API key if there is one.

        It opens as many connections as it is asked to: a bound would turn an open loop into a
        closed one unnoticed. Proxies of the environment are for endpoints only.
        """
        headers = {}
        if self.spec.api_key_env is not None:
            key = os.environ.get(self.spec.api_key_env)
            if not key:
                raise BuildError(
                    f"build {self.spec.name}: the environment variable {self.spec.api_key_env} "
                    "with its API key is not set"
                )
            if not (key.isascii() and key.isprintable()):
                raise BuildError(
                    f"build {self.spec.name}: the environment variable {self.spec.api_key_env} "
                    "holds line breaks or other characters that no API key has"
                )
            headers["authorization"] = f"Bearer {key}"
        return httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=timeout,
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=100, keepalive_expiry=REUSE_S
            ),
            trust_env=self.spec.endpoint is not None,
        )

    def check_alive(self) -> None:
        """Raise BuildError when the command has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise BuildError(
                f"build {self.spec.name} ended with exit code {self._process.returncode}; "
                f"{self.log_tail()}"
            )

    def log_tail(self) -> str:
        """The last lines of the command's output, for an error message."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            text = ""
        if not text:
            return "it wrote nothing"
        tail = "\n".join(f"  | {one_line(line)}" for line in text.splitlines()[-LOG_LINES:])
        return f"see {self.log}:\n{tail}"

    def _start(self, port: int) -> None:
        command = shlex.split(str(self.spec.command).replace("{port}", str(port)))
        environment = os.environ | NEUTRAL_ENVIRONMENT | self.spec.env
        workdir = self._make_worktree() if self.spec.worktree else self.spec.workdir
        if workdir is not None and not workdir.is_dir():
            raise BuildError(f"build {self.spec.name}: workdir {workdir} is no directory")
        command[0] = _find_program(command[0], environment, workdir, self.spec.name)
        launch = [sys.executable, "-I", "-S", str(launcher.__file__), *command]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    launch,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=workdir,
                    start_new_session=True,
                )
        except OSError as error:
            raise BuildError(
                f"build {self.spec.name} cannot be started with its log in {self.log}: "
                f"{error.strerror}"
            ) from error

    async def _wait_until_healthy(self, client: httpx.AsyncClient) -> None:
        found = await until_healthy(
            client,
            self.check_alive,
            timeout_s=self.spec.health_timeout_s,
            unreachable_s=self.spec.unreachable_s,
        )
        if not found.is_healthy:
            raise BuildError(self._not_healthy(found))

    def _not_healthy(self, found: Health) -> str:
        build = f"build {self.spec.name} at {self.base_url}"
        if found.is_key_refused:
            key = self.spec.api_key_env
            asked = "set api_key_env" if key is None else f"check the API key in {key}"
            return f"{build} refuses its caller ({found.state}): {asked}"
        waited_s, way_out = self.spec.health_timeout_s, "raise health_timeout_s if it needs longer"
        if self.spec.endpoint is not None and not found.connected:
            waited_s = self.spec.unreachable_s
            way_out = (
                "start that server, correct endpoint, or set health_timeout_s to how long "
                "it may still take to start"
            )
        tail = "" if self._process is None else f"; {self.log_tail()}"
        return f"{build} is not healthy after {waited_s:g} s ({found.state}); {way_out}{tail}"

    async def _identify(self, client: httpx.AsyncClient) -> None:
        try:
            models = await _models(client)
            self.fingerprint, self.components = await _fingerprint(client, models, self.spec.name)
        except (httpx.HTTPError, *UNREADABLE) as error:
            raise BuildError(
                f"build {self.spec.name} at {self.base_url} does not speak the OpenAI API: "
                f"/v1/models: {type(error).__name__} {one_line(str(error))}"
            ) from error
        served = [one_line(str(model.get("id"))) for model in models]
        if self.spec.model is None and not served:
            raise BuildError(f"build {self.spec.name} serves no model: set build.model")
        if self.spec.model is not None and served and self.spec.model not in served:
            raise BuildError(
                f"build {self.spec.name} serves {', '.join(served)}, not {self.spec.model}"
            )
        self.model = self.spec.model or served[0]

    async def _stop(self) -> None:
        # Shielded: an interrupt while stopping must not leave the build's processes behind.
        await asyncio.shield(asyncio.to_thread(self._stop_now))

    def _stop_now(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        worktree, self._worktree = self._worktree, None
        if worktree is not None:
            self._git("worktree", "remove", "--force", str(worktree / "tree"), check=False)
            shutil.rmtree(worktree, ignore_errors=True)

    def _make_worktree(self) -> Path:
        self._worktree = Path(tempfile.mkdtemp(prefix="inferloop-build-"))
        tree = self._worktree / "tree"
        self._git("worktree", "add", "--detach", str(tree), str(self.spec.worktree), check=True)
        return tree

    def _git(self, *arguments: str, check: bool) -> None:
        repository = str(self.spec.workdir or Path.cwd())
        command = ["git", "-C", repository, *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise BuildError(
                f"build {self.spec.name}: a worktree needs git, which is not installed"
            ) from error
        if check and result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["git failed"])[-1]
            raise BuildError(f"build {self.spec.name}: worktree {self.spec.worktree}: {reason}")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _find_program(
    program: str, environment: Mapping[str, str], workdir: Path | None, build: str
) -> str:
    """The program's path: from PATH, else from beside this Python (a venv that is not active)."""
    if "/" in program:
        path = (workdir or Path.cwd()) / program
        found = shutil.which(path)
    else:
        beside = Path(sys.executable).parent / program
        found = shutil.which(program, path=environment.get("PATH")) or (
            str(beside) if beside.exists() else None
        )
    if found is None:
        where = "" if "/" in program else " on the PATH"
        raise BuildError(f"build {build}: there is no program {program!r} to execute{where}")
    return found


async def _models(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    response = await client.get("/v1/models")
    response.raise_for_status()
    return [dict(model) for model in response.json()["data"]]


async def _fingerprint(
    client: httpx.AsyncClient, models: list[dict[str, Any]], name: str
) -> tuple[str, dict[str, Any]]:
    """The engine's own, else one over what is known of it; the name the user gave it is part of
    that, for two servers of a model look alike from outside."""
    response = await client.get("/inferloop/build")
    if response.is_success:
        body = response.json()
        said = dict(body["components"])
        json.dumps(said, allow_nan=False)
        return one_line(str(body["fingerprint"])), said
    stable = ("id", "root", "parent", "owned_by", "max_model_len", "meta")
    components: dict[str, Any] = {
        "name": name,
        "models": [{key: model[key] for key in stable if key in model} for model in models],
    }
    version = await client.get("/version")
    if version.is_success and "json" in version.headers.get("content-type", ""):
        components["version"] = version.json()
    canonical = json.dumps(components, sort_keys=True, allow_nan=False).encode()
    return hashlib.blake2s(canonical, digest_size=16).hexdigest(), components
