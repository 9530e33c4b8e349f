"""`inferloop replay` and `inferloop db`, as a user types them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli.db
import cli.replay  # noqa: F401 - adds its commands
from cli.main import app
from replay.builds import BuildSpec
from replay.errors import BuildError, RunError
from replay.run import Bounds
from tests.replay.conftest import prompts, traffic

Toys = Callable[[str], BuildSpec]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("replay.run.Bounds", partial(Bounds, lateness_p99_ms=math.inf))
    for name in ("INFERLOOP_DATABASE_URL", "INFERLOOP_HOME", "INFERLOOP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def invoke(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result.output


def build_file(path: Path, spec: BuildSpec) -> str:
    path.write_text(f"[build]\nname = '{spec.name}'\nendpoint = '{spec.endpoint}'\n")
    return str(path)


def test_before_the_first_run_the_list_says_how_to_make_one(home: Path) -> None:
    assert "no run yet: make one with `inferloop replay`" in invoke("replay", "list")


def test_a_replay_is_reported_and_can_be_shown_again(home: Path, toys: Toys) -> None:
    old = build_file(home / "old.toml", toys("plain"))
    new = build_file(home / "new.toml", toys("flip"))
    path = traffic(home / "t.jsonl", prompts(8))
    with path.open("a") as file:
        file.write("{broken\n")
    output = invoke("replay", "--old", old, "--new", new, "--traffic", str(path), "--limit", "6")
    assert "run 1: valid" in output
    assert "1 broken lines were skipped" in output
    assert "t.jsonl:9: " in output
    assert "noise floor (OLD/OLD)" in output
    assert "next: inferloop replay show 1 --diff 1" in output
    shown = invoke("replay", "show", "1", "--diff", "2")
    assert "diff 2 of 6" in shown
    assert "first divergent token: 3, where OLD's margin was" in shown
    assert "Question" in shown
    assert invoke("replay", "show", "--diffs", "3").count("first divergent token") == 3
    assert "flip" in invoke("replay", "list")
    with pytest.raises(RunError, match="run 1 has 6 diffs: there is no diff 7"):
        invoke("replay", "show", "1", "--diff", "7")
    with pytest.raises(RunError, match="there is no run 5"):
        invoke("replay", "show", "5")


def test_an_invalid_run_exits_with_1(home: Path, toys: Toys) -> None:
    old = build_file(home / "old.toml", toys("plain"))
    new = build_file(home / "new.toml", toys("errors"))
    path = str(traffic(home / "t.jsonl", prompts(6)))
    output = invoke("replay", "run", "--old", old, "--new", new, "--traffic", path, exit_code=1)
    assert "run 1: invalid" in output
    assert "of 6 requests failed" in output


def test_wrong_input_is_an_error_for_the_user(home: Path) -> None:
    with pytest.raises(BuildError, match="cannot read the build file") as caught:
        invoke("replay", "--old", "a.toml", "--new", "b.toml")
    assert caught.value.exit_code == 1
    assert "Missing option '--new'" in invoke("replay", "--old", "a.toml", exit_code=2)
    assert "Example: inferloop replay --old" in invoke("replay", "run", "--help")


def test_the_database_is_upgraded_and_reported(home: Path) -> None:
    assert "revision none" in invoke("db", "current", exit_code=1)
    assert "upgraded to revision" in invoke("db", "upgrade")
    assert "is at revision" in invoke("db", "upgrade")
    assert "inferloop.sqlite revision" in invoke("db", "current")
