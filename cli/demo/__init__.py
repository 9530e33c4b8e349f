"""`inferloop demo`: the whole loop on the real model, command by command."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.main import app


@app.command()
def demo(
    prompts: Annotated[
        int | None, typer.Option(help="send only the first so many prompts", min=1)
    ] = None,
    dashboard: Annotated[
        bool, typer.Option(help="serve the dashboard at the end, until Ctrl-C (in a terminal)")
    ] = True,
) -> None:
    """Run the whole loop on the real model: serve, trace, replay, judge, gate, feed back.

    Everything it makes lies in INFERLOOP_HOME; every command it runs is shown.

    Example: inferloop demo --no-dashboard
    """
    import asyncio
    import sys

    from capture.settings import Settings
    from cli.demo.scenario import Scenario

    scenario = Scenario(Settings(), prompts)
    asyncio.run(scenario.run())
    if dashboard and sys.stdout.isatty():
        scenario.serve_dashboard()
