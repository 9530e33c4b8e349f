"""Every command explains itself, quickly, and fails with one line."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import typer

from cli.main import COMMANDS, app, load_commands

load_commands()
GROUP = typer.main.get_command(app)


def leaves() -> list[tuple[str, ...]]:
    """All commands that do something: ("serve",), ("replay", "run"), ..."""
    found = []
    for name, command in GROUP.commands.items():
        below = getattr(command, "commands", None)
        found += [(name, inner) for inner in below] if below else [(name,)]
    return found


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_version_can_be_asked_for() -> None:
    assert run("--version").stdout.startswith("inferloop ")


def test_every_module_adds_its_command() -> None:
    assert {name for name, *_ in leaves()} == set(COMMANDS)


@pytest.mark.parametrize("path", leaves(), ids=" ".join)
def test_help_shows_an_example(path: tuple[str, ...]) -> None:
    command = GROUP
    for name in path:
        command = command.commands[name]
    assert "Example:" in (command.help or ""), path
    assert "inferloop " + path[0] in (command.help or "")


def test_help_answers_fast() -> None:
    """Heavy libraries are imported where they are used: the goal is 0.3 s on a quiet machine. On a
    busy one only the time on a processor tells."""
    heavy = ("torch", "duckdb", "streamlit", "fastapi", "sqlalchemy", "numba", "numpy", "httpx")
    probe = f"""
import sys
from cli.main import load_commands
load_commands()
sys.exit(", ".join(name for name in {heavy!r} if name in sys.modules) or 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"imported for --help: {result.stderr}"
    assert min(_cpu_s_of_help() for _ in range(5)) < 1.0


def _cpu_s_of_help() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_an_error_is_one_line_and_a_code(tmp_path) -> None:
    result = run("replay", "--old", str(tmp_path / "no.toml"), "--new", str(tmp_path / "no.toml"))
    assert result.returncode == 1
    assert result.stderr.startswith("inferloop: ")
    assert len(result.stderr.splitlines()) == 1
