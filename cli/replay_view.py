"""How `inferloop replay` shows runs and diffs in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from evaluation.wording import compare, visible
from replay.models import Diff, Run
from replay.run import state

STATUS_STYLES = {"valid": "bold green", "invalid": "bold red", "aborted": "bold red"}
METRIC_NAMES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_p99_ms": "p99 inter-token latency",
    "duration_ms": "duration",
}
LISTED_DIFFS = 20
PROMPT_CHARS = 300


def run_view(run: Run, changed: Sequence[Diff]) -> RenderableType:
    """A run: status, arms, noise floor and changes, latencies, the list of diffs."""
    parts: list[RenderableType] = [_headline(run)]
    if run.reason:
        parts.append(Text(f"  {visible(run.reason)}", style="red"))
    parts += _traffic_lines(run)
    if "arms" in run.summary:
        parts += [_arms_table(run.summary["arms"]), _noise_lines(run), _latency_table(run)]
    if changed:
        parts.append(_diff_table(changed))
    return Group(*parts)


def runs_table(runs: Sequence[Run]) -> Table:
    """One line per run."""
    table = Table("run", "status", "old", "new", "requests", "changed", "started (UTC)")
    for run in runs:
        changes = run.summary.get("changes") or {}
        table.add_row(
            str(run.id),
            _status(run),
            Text(visible(run.name_of("old"))),
            Text(visible(run.name_of("new"))),
            str(run.summary.get("traffic", {}).get("requests", "")),
            f"{changes['share']:.1%}" if changes else "",
            run.started_at.strftime("%Y-%m-%d %H:%M"),
        )
    return table


def diff_view(diff: Diff, number: int, of: int) -> RenderableType:
    """One diff side by side, what changed highlighted."""
    title = Text.assemble(
        ("diff ", "bold"), (f"{number} of {of}", "bold"), f"  {_kind(diff)}  class ",
        (visible(diff.class_key), "cyan"),
    )  # fmt: skip
    request = Text(f"request {diff.request_id}", style="dim")
    parts: list[RenderableType] = [title, request, _prompt_panel(diff.input)]
    parts += [Text(f"  {visible(line)}", style="yellow") for line in explanation(diff)]
    left, right = compare(diff.left.output_text or "", diff.right.output_text or "")
    table = Table(expand=True, show_lines=False)
    table.add_column("OLD", ratio=1)
    table.add_column("NEW", ratio=1)
    table.add_row(_spans(left, "bold red"), _spans(right, "bold green"))
    return Group(*parts, table)


def explanation(diff: Diff) -> list[str]:
    """What differs, stage by stage, in words."""
    detail, lines = diff.detail, []
    if "error" in detail:
        old, new = (str(side) if side else "answered" for side in detail["error"])
        lines.append(f"OLD: {old}; NEW: {new}")
    if "prompt" in detail:
        around = [repr(side) for side in detail["prompt"]["around"]]
        at = detail["prompt"]["first_difference"]
        lines.append(f"rendered prompt differs at character {at}: {around[0]} / {around[1]}")
    if "prompt_ids" in detail:
        found = detail["prompt_ids"]
        lengths = "{} / {}".format(*found["lengths"])
        lines.append(f"prompt tokens differ at {found['first_difference']} (lengths {lengths})")
    for stage in ("sampling", "stop"):
        for name, (old, new) in detail.get(stage, {}).items():
            lines.append(f"{name}: OLD {old!r}, NEW {new!r}")
    if diff.first_divergent is not None:
        margin = "" if diff.margin is None else f", where OLD's margin was {diff.margin:.3f} nats"
        lines.append(f"first divergent token: {diff.first_divergent}{margin}")
    if "finish_reason" in detail:
        lines.append("finish reason: OLD {}, NEW {}".format(*detail["finish_reason"]))
    if "lengths" in detail:
        lengths, repeated = detail["lengths"], detail["repetition"]
        lines.append(
            f"length: OLD {lengths[0]}, NEW {lengths[1]} tokens; "
            f"repetition: OLD {repeated[0]:.0%}, NEW {repeated[1]:.0%}"
        )
    if any(detail.get("invalid_utf8", ())):
        lines.append("invalid UTF-8: OLD {}, NEW {} characters".format(*detail["invalid_utf8"]))
    if detail.get("equal_when_normalised"):
        lines.append("equal but for what a reader does not see (white space, composition, width)")
    if detail.get("also_in_noise"):
        lines.append("the two OLD passes differ here too: noise")
    return lines


def _status(run: Run) -> Text:
    shown = state(run)
    return Text(shown, style=STATUS_STYLES.get(shown, "bold yellow"))


def _headline(run: Run) -> Text:
    return Text.assemble(
        (f"run {run.id}: ", "bold"), _status(run), "  OLD ", (visible(run.name_of("old")), "bold"),
        f" ({run.old_build.fingerprint[:12]})  NEW ", (visible(run.name_of("new")), "bold"),
        f" ({run.new_build.fingerprint[:12]})",
    )  # fmt: skip


def _traffic_lines(run: Run) -> list[Text]:
    traffic = run.summary.get("traffic") or {}
    count = traffic.get("requests")
    requests = "1 request" if count == 1 else f"{count} requests"
    lines = [Text(f"  traffic: {requests} of {visible(run.traffic_file)}")]
    if traffic.get("shortened_s"):
        lines.append(Text(f"  {traffic['shortened_s']:.0f} s of idle time were left out"))
    if traffic.get("skipped"):
        counts = ", ".join(f"{count} {reason}" for reason, count in traffic["skipped"].items())
        lines.append(Text(f"  not replayed: {counts}", style="yellow"))
    if traffic.get("broken"):
        lines.append(Text(f"  {traffic['broken']} broken lines were skipped:", style="yellow"))
        lines += [Text(f"    {visible(line)}", style="yellow") for line in traffic["broken_lines"]]
    return lines


def _arms_table(arms: dict[str, Any]) -> Table:
    table = Table("pass", "requests", "failed", "output tokens", "seconds", "sent late p50/p99 ms")
    for arm in ("old_a", "new", "old_b"):
        figures = arms[arm]
        late = figures["lateness"]
        table.add_row(
            arm,
            str(figures["requests"]),
            str(figures["failures"]),
            str(figures["output_tokens"]),
            f"{figures['duration_s']:.1f}",
            f"{late['p50_ms']:.1f} / {late['p99_ms']:.1f}",
        )
    return table


def _noise_lines(run: Run) -> RenderableType:
    noise, changes = run.summary["noise"], run.summary["changes"]
    table = Table("", "differ", "of", "share", "beyond noise", "median fork", "first stage")
    for name, figures in (("noise floor (OLD/OLD)", noise), ("change (OLD/NEW)", changes)):
        fork = figures["first_divergent_median"]
        kinds = ", ".join(f"{kind} {count}" for kind, count in figures["kinds"].items())
        table.add_row(
            name,
            str(figures["differing"]),
            str(figures["requests"]),
            f"{figures['share']:.1%}",
            "" if figures is noise else str(figures["beyond_noise"]),
            "" if fork is None else f"token {fork:.0f}",
            kinds,
        )
    return table


def _latency_table(run: Run) -> Table:
    table = Table(
        "medians, ms", "OLD", "NEW", "change per request [95 %]", "noise [95 %]", "verdict"
    )
    for change in run.summary["latency"]:
        verdict = change["verdict"]
        style = {"slower": "bold red", "faster": "bold green"}.get(verdict, "")
        table.add_row(
            METRIC_NAMES[change["metric"]],
            f"{change['old']:.2f}",
            f"{change['new']:.2f}",
            _interval(change["change"]),
            _interval(change["noise"]),
            Text(verdict, style=style),
        )
    return table


def _interval(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['median']:+.2f}"
    return f"{found['median']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"


def _diff_table(changed: Sequence[Diff]) -> Table:
    title = f"what changed ({min(len(changed), LISTED_DIFFS)} of {len(changed)} shown)"
    table = Table("#", "kind", "class", "fork", "margin", "tokens", "asked", title=title)
    for number, diff in enumerate(changed[:LISTED_DIFFS], start=1):
        table.add_row(
            str(number),
            _kind(diff),
            Text(visible(diff.class_key)),
            "" if diff.first_divergent is None else str(diff.first_divergent),
            "" if diff.margin is None else f"{diff.margin:.3f}",
            "" if diff.token_distance is None else str(diff.token_distance),
            Text(_asked(diff.input)[:60], no_wrap=True, overflow="ellipsis"),
        )
    return table


def _kind(diff: Diff) -> Text:
    noisy = bool(diff.detail.get("also_in_noise"))
    return Text(diff.kind + (" (noise)" if noisy else ""), style="dim" if noisy else "bold")


def _asked(asked: dict[str, Any]) -> str:
    """The last thing that was asked, on one line."""
    if asked.get("messages"):
        content = asked["messages"][-1].get("content")
        text = content if isinstance(content, str) else str(content)
    else:
        text = str(asked.get("prompt") or asked.get("prompt_token_ids") or "")
    return visible(" ".join(text.split()))


def _prompt_panel(asked: dict[str, Any]) -> Panel:
    text = _asked(asked)
    shown = text if len(text) <= PROMPT_CHARS else text[:PROMPT_CHARS] + "…"
    return Panel(Text(shown), title="asked", title_align="left")


def _spans(spans: Sequence[Any], style: str) -> Text:
    return Text.assemble(*((span.text, style if span.changed else "") for span in spans))
