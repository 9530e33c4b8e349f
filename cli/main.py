"""The `inferloop` command: its subcommands and how errors reach the user."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import typer

COMMANDS = (
    "demo",
    "serve",
    "proxy",
    "collect",
    "ring",
    "top",
    "sql",
    "why",
    "export",
    "mark",
    "traffic",
    "replay",
    "label",
    "gate",
    "feedback",
    "dashboard",
    "db",
)
"""Modules of this package, each of which adds its command to `app`; in the order of the help."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Watch an LLM engine token by token, replay traffic, judge the diffs, gate the release.",
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"inferloop {version('inferloop')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Only what stands before a command."""


def load_commands() -> None:
    """Import every command's module, which adds it to `app`."""
    for command in COMMANDS:
        importlib.import_module(f"cli.{command}")


def run() -> None:
    """Entry point. An error meant for the user (it has an `exit_code`) becomes one clear line."""
    load_commands()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os._exit(0)
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None or os.environ.get("INFERLOOP_TRACEBACK"):
            raise
        typer.echo(f"inferloop: {error}", err=True)
        sys.exit(int(exit_code))
