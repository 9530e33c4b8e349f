"""The report behind `inferloop why`: a request, its gaps, what was slow and why, on one screen.

`explain` reads it from the lake, `render` draws it for a terminal, `as_json` gives it to programs.
Not for finding the requests: that is `capture.why.lookup`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from capture.why.lookup import OPEN, Subject, running_and_waiting
from capture.why.macro import why_query

if TYPE_CHECKING:
    import duckdb
    from rich.console import Group, RenderableType
    from rich.table import Table

BLOCKS = "▁▂▃▄▅▆▇█"
MARKS = 72
ROWS = 12
SHOWN = 3
"""Requests named of those that one waits for."""

OWN_PROMPT = "prefill"
SENDING = "sending slow"
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
class Ahead:
    """Of a request in the queue: how many run, the oldest of them in words, how many others wait
    and whom of those the engine prefers."""

    running: int
    named: list[str]
    waiting: int
    more_important: int
    earlier: int


@dataclass(frozen=True)
class Explanation:
    """A request with its gaps in ms, by position from 1, and its slow moments in order; `ahead` of
    one that waits for its first seat."""

    subject: Subject
    gaps_ms: list[float]
    slow: list[Slow]
    ahead: Ahead | None = None

    @property
    def ttft_ms(self) -> float | None:
        """From the trace: a request that failed later had a first token, too."""
        first = (s.latency_ms for s in self.slow if s.position == 0 and s.cause != SENDING)
        return next(first, None)

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
        Explanation(
            s,
            gaps.get((s.engine_id, s.slot), []),
            slow.get((s.engine_id, s.slot), []),
            _ahead(lake, s) if s.outcome == "waiting" else None,
        )
        for s in subjects
    ]


def _ahead(lake: duckdb.DuckDBPyConnection, subject: Subject) -> Ahead:
    running, waiting = running_and_waiting(lake, subject.engine_id)
    others = [one for one in waiting if one.slot != subject.slot]
    equal = [one for one in others if one.effective == subject.effective]
    return Ahead(
        running=len(running),
        named=[_in_words(one) for one in running[:SHOWN]],
        waiting=len(others),
        more_important=sum(one.effective > subject.effective for one in others),
        earlier=sum(one.arrived_at < subject.arrived_at for one in equal),
    )


def _in_words(subject: Subject) -> str:
    return (
        f"{subject.request_id[:8]} (tenant {subject.tenant}, {subject.class_key}, "
        f"priority {subject.effective}{_adjusted(subject)})"
    )


def _adjusted(subject: Subject) -> str:
    if not subject.adjustment:
        return ""
    return f", {subject.adjustment:+d} of it by the feedback policy"


def as_json(explanation: Explanation) -> dict[str, Any]:
    """For `json.dumps`: times as ISO 8601 in UTC, durations in ms."""
    request = asdict(explanation.subject)
    for name in ("arrived_at", "as_of", "preempted_at"):
        request[name] = None if request[name] is None else request[name].isoformat()
    return {
        "request": request,
        "ahead": None if explanation.ahead is None else asdict(explanation.ahead),
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
        f"arrived {s.arrived_at:%Y-%m-%d %H:%M:%S.%f} UTC · {_outcome(s)} · "
        f"{prompt} prompt tokens{cached}, {output:,} output tokens\n"
    )
    known = [f"{name} {duration(ms)}" for name, ms in times.items() if ms is not None]
    if s.outcome in OPEN and s.as_of is not None:
        known.append(f"{duration(_ms(s.as_of - s.arrived_at))} so far, at {s.as_of:%H:%M:%S} UTC")
    text.append(" · ".join(known), style="cyan")
    return text


def _outcome(subject: Subject) -> str:
    if subject.outcome == "unfinished" and subject.preempted_at is not None:
        return "preempted, waits to be resumed"
    return {
        "unfinished": "still running",
        "waiting": "still waiting in the queue",
        "engine_gone": "its engine ended before it did",
        "abort": "aborted",
        "error": "failed",
    }.get(subject.outcome, f"finished ({plain(subject.outcome)})")


def _ms(time: timedelta) -> float:
    return time.total_seconds() * 1000


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
        after = _ms(slow.emitted_at - explanation.subject.arrived_at)
        table.add_row(
            _place(slow),
            f"+{duration(after)}",
            duration(slow.latency_ms),
            "-" if slow.usual_ms is None else duration(slow.usual_ms),
            because,
        )
    hidden = len(explanation.slow) - len(worst)
    if hidden:
        table.add_row("", "", "", "", Text(f"and {hidden} more: --json has all", style="dim"))
    return table


def _place(slow: Slow) -> str:
    """Which moment of the request a row is about."""
    if slow.position is None:
        return "sent"
    token = "first" if slow.position == 0 else str(slow.position)
    return f"{token} sent" if slow.cause == SENDING else token


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
    subject, ahead = explanation.subject, explanation.ahead
    if ahead is not None:
        return _waits(subject, ahead)
    if subject.outcome == "unfinished":
        return "no token yet: it is in its prompt; ask again"
    return "it got no token, so there is nothing to explain; its end says why"


def _waits(subject: Subject, ahead: Ahead) -> str:
    who = f": {', '.join(ahead.named)}" if ahead.named else ""
    more = ", …" if ahead.running > len(ahead.named) else ""
    return plain(
        f"it waits behind {ahead.running} running{who}{more}; others that wait: {ahead.waiting}, "
        f"{ahead.more_important} with a higher priority and {ahead.earlier} of the same that came "
        f"before it; its priority is {subject.effective}{_adjusted(subject)}"
    )


def duration(ms: float) -> str:
    """A time as people read it."""
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def plain(text: str) -> str:
    """Names come from clients: nothing of theirs may steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
