"""Tables on a terminal or in a pipe, figures for people, clients' texts without control codes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPE_COLUMNS = 10_000  # no line of a pipe is folded


def show(renderable: RenderableType) -> None:
    """Print to standard output: folded and coloured on a terminal, plain lines elsewhere."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(renderable)
        return
    console = Console(width=PIPE_COLUMNS, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def one_line(text: str, limit: int = 500) -> str:
    """A client's text on one line, with nothing a terminal would obey."""
    from evaluation.wording import visible

    shown = visible(text[: limit + 1]).replace("\n", "\u240a").replace("\t", "\u2409")
    return shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"


def size(number_bytes: float) -> str:
    """Bytes for people: 3.2 MiB."""
    value, units = float(number_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def span(seconds: float) -> str:
    """A duration for people: 3.2 s, 12 min, 5.0 h."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86_400:.1f} days"
