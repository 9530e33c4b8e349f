"""docs/sql-guide.md and docs/exports.md show queries that run and commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer
import yaml

from capture.console.commands import COMMANDS
from capture.sql.query import QuerySession
from cli.main import app, load_commands

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("sql-guide.md", "exports.md")}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def test_the_guide_s_queries_run(session: QuerySession) -> None:
    queries = blocks("sql-guide.md", "sql")
    assert len(queries) >= 4
    for query in queries:
        with session.run(query) as reader:
            reader.read_all()


def test_the_guide_names_every_command_of_the_shell() -> None:
    for name in COMMANDS:
        assert f"`{name}" in PAGES["sql-guide.md"], name


@pytest.mark.parametrize("page", list(PAGES))
def test_the_commands_shown_take_these_options(page: str) -> None:
    load_commands()
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert lines
    for line in lines:
        words = shlex.split(line.rpartition("| ")[2])
        assert words[0] == "inferloop"
        command: click.Command = typer.main.get_command(app)
        context = click.Context(command)
        arguments = words[1:]
        while isinstance(command, click.Group):
            command = command.commands[arguments.pop(0)]
            context = click.Context(command, parent=context)
        command.parse_args(context, arguments)


def test_the_collector_s_configuration_is_one() -> None:
    (text,) = blocks("exports.md", "yaml")
    config = yaml.safe_load(text)
    for pipeline in config["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(config[part])
