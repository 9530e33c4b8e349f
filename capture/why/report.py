"""The report behind `inferloop why`: a request, its gaps, what was slow and why, on one screen.

`explain` reads it from the lake, `render` draws it for a terminal, `as_json` gives it to programs.
Not for finding the requests: that is `capture.why.lookup`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from capture.why.lookup import Subject
from capture.why.macro import why_query

if TYPE_CHECKING:
    import duckdb
    from rich.console import Group, RenderableType
    from rich.table import Table

BLOCKS = "▁▂▃▄▅▆▇█"
MARKS = 72
ROWS = 12
OWN_PROMPT = "prefill"
REST = "unexplained"


@dataclass(frozen=True)
class Slow:
    """A first token, a gap or a sending (`position` None) that took long, and the verdict."""

    position: int | None
    emitted_at: datetime
    latency_ms: float
    usual_ms: float | None
    cause: str
    evidence: str
    explained_ms: float
    causes: list[dict[str, Any]]
    step_id: int | None

    @property
    def lost_ms(self) -> float:
        """What it took beyond the usual; a first token: all of it, for it has no usual of its
        own."""
        return self.latency_ms - (0.0 if self.position == 0 else self.usual_ms or 0.0)


@dataclass(frozen=True)
class Explanation:
    """A request with its gaps in ms, by position from 1, and its slow moments in order."""

    subject: Subject
    gaps_ms: list[float]
    slow: list[Slow]

    @property
    def ttft_ms(self) -> float | None:
        """From the trace: a request that failed later had a first token, too."""
        return next((slow.latency_ms for slow in self.slow if slow.position == 0), None)

    def lost_ms(self) -> dict[str, float]:
        """The time lost by cause, the largest first; what the causes leave is `unexplained`."""
        lost: dict[str, float] = {}
        for slow in self.slow:
            left = slow.lost_ms
            for share in slow.causes:
                taken = min(share["ms"], left)
                left -= taken
                lost[share["cause"]] = lost.get(share["cause"], 0.0) + taken
            lost[REST] = lost.get(REST, 0.0) + left
        ordered = sorted(lost.items(), key=lambda item: -item[1])
        return {cause: ms for cause, ms in ordered if ms > 0}


def explain(lake: duckdb.DuckDBPyConnection, subjects: list[Subject]) -> list[Explanation]:
    """An explanation for each of the subjects, in their order."""
    if not subjects:
        return []
    pairs = ", ".join(f"('{s.engine_id}'::UUID, {s.slot})" for s in subjects)
    slow: dict[tuple[str, int], list[Slow]] = {}
    for row in lake.execute(why_query(f"(r.engine_id, r.slot) IN ({pairs})")).fetchall():
        position, at, latency, usual, cause, evidence, step, slot, explained, causes, _, engine = (
            row
        )
        moment = Slow(position, at, latency, usual, cause, evidence, explained, causes, step)
        slow.setdefault((str(engine), slot), []).append(moment)
    gaps: dict[tuple[str, int], list[float]] = {}
    for engine, slot, latencies in lake.execute(
        "SELECT t.engine_id::VARCHAR, t.slot, list(t.latency_us / 1000 ORDER BY t.position) "
        f"FROM tokens AS t JOIN (VALUES {pairs}) AS w(engine_id, slot) "
        "ON t.engine_id = w.engine_id AND t.slot = w.slot WHERE NOT t.is_first GROUP BY ALL"
    ).fetchall():
        gaps[engine, slot] = latencies
    return [
        Explanation(s, gaps.get((s.engine_id, s.slot), []), slow.get((s.engine_id, s.slot), []))
        for s in subjects
    ]


def as_json(explanation: Explanation) -> dict[str, Any]:
    """For `json.dumps`: times as ISO 8601 in UTC, durations in ms."""
    request = asdict(explanation.subject)
    request["arrived_at"] = explanation.subject.arrived_at.isoformat()
    return {
        "request": request,
        "slow": [{**asdict(s), "emitted_at": s.emitted_at.isoformat()} for s in explanation.slow],
        "lost_ms": explanation.lost_ms(),
        "gaps_ms": explanation.gaps_ms,
    }


def render(explanation: Explanation) -> Group:
    """One screen of it, for a `rich` console."""
    from rich.console import Group

    parts: list[RenderableType] = [_header(explanation)]
    if explanation.gaps_ms:
        parts.append(_timeline(explanation))
    if explanation.slow:
        parts.append(_table(explanation))
    parts.append(_verdict(explanation))
    return Group(*parts)


def _header(explanation: Explanation) -> RenderableType:
    from rich.text import Text

    s = explanation.subject
    adjusted = f" ({s.adjustment:+d} by the feedback policy)" if s.adjustment else ""
    where = f"proxy {s.engine_id[:8]}" if s.is_proxied else f"engine {s.engine_id[:8]}"
    cached = "" if s.cached_tokens is None else f" ({s.cached_tokens:,} cached)"
    tokens = len(explanation.gaps_ms) + (explanation.ttft_ms is not None)
    output = s.output_tokens if s.output_tokens is not None else tokens
    times = {
        "queue": s.queue_ms,
        "TTFT": explanation.ttft_ms if s.ttft_ms is None else s.ttft_ms,
        "TPOT": s.tpot_ms,
        "sending": s.sending_ms,
        "duration": s.duration_ms,
    }
    text = Text()
    text.append(f"request {s.request_id}\n", style="bold")
    text.append(
        plain(
            f"tenant {s.tenant or '-'} · class {s.class_key or '-'} · priority {s.priority}"
            f"{adjusted} · {s.model or 'unknown model'} on {where}\n"
        )
    )
    prompt = "unknown" if s.prompt_tokens is None else f"{s.prompt_tokens:,}"
    text.append(
        f"arrived {s.arrived_at:%Y-%m-%d %H:%M:%S.%f} UTC · {_outcome(s.outcome)} · "
        f"{prompt} prompt tokens{cached}, {output:,} output tokens\n"
    )
    known = (f"{name} {duration(ms)}" for name, ms in times.items() if ms is not None)
    text.append(" · ".join(known), style="cyan")
    return text


def _outcome(outcome: str) -> str:
    return {
        "unfinished": "still running",
        "engine_gone": "its engine ended before it did",
        "abort": "aborted",
        "error": "failed",
    }.get(outcome, f"finished ({plain(outcome)})")


def _timeline(explanation: Explanation) -> RenderableType:
    """The gaps as a line of blocks, each the longest of the tokens it stands for."""
    from rich.text import Text

    gaps = explanation.gaps_ms
    per_mark = -(-len(gaps) // MARKS)
    marks = [max(gaps[i : i + per_mark]) for i in range(0, len(gaps), per_mark)]
    highest = max(marks)
    usual = sorted(gaps)[len(gaps) // 2]
    line = "".join(BLOCKS[int(mark / (highest or 1) * (len(BLOCKS) - 1))] for mark in marks)
    text = Text(f"\ngaps {line}\n")
    unit = "a token" if per_mark == 1 else f"{per_mark} tokens"
    text.append(
        f"     a mark is {unit}; the highest {duration(highest)}, usually {duration(usual)}\n",
        style="dim",
    )
    return text


def _table(explanation: Explanation) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("token", "came at", "took", "usually"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("because", ratio=1, overflow="fold")
    worst = sorted(explanation.slow, key=lambda slow: -slow.lost_ms)[:ROWS]
    for slow in explanation.slow:
        if slow not in worst:
            continue
        because = Text(slow.cause, style="yellow")
        because.append(plain(f": {slow.evidence}"), style="none")
        after = (slow.emitted_at - explanation.subject.arrived_at).total_seconds() * 1000
        table.add_row(
            {None: "sent", 0: "first"}.get(slow.position, str(slow.position)),
            f"+{duration(after)}",
            duration(slow.latency_ms),
            "-" if slow.usual_ms is None else duration(slow.usual_ms),
            because,
        )
    hidden = len(explanation.slow) - len(worst)
    if hidden:
        table.add_row("", "", "", "", Text(f"and {hidden} more: --json has all", style="dim"))
    return table


def _verdict(explanation: Explanation) -> RenderableType:
    from rich.text import Text

    lost = explanation.lost_ms()
    total = sum(lost.values())
    text = Text("\n")
    if not explanation.slow:
        text.append(_nothing(explanation), style="bold")
        return text
    (cause, most), *others = lost.items() or [(REST, 0.0)]
    what = f"{cause} (its own prompt)" if cause == OWN_PROMPT else cause
    text.append(
        f"{duration(most)} of the {duration(total)} it waited went to: {what}", style="bold"
    )
    named = [f"{name} {duration(ms)}" for name, ms in others if ms >= 0.05 * total]
    if named:
        text.append(f"; {', '.join(named)}")
    return text


def _nothing(explanation: Explanation) -> str:
    """What to say of a request without a single token."""
    if explanation.subject.outcome == "unfinished":
        return "no token yet: it is in its prompt; ask again"
    return "it got no token, so there is nothing to explain; its end says why"


def duration(ms: float) -> str:
    """A time as people read it."""
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def plain(text: str) -> str:
    """Names come from clients: nothing of theirs may steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
