"""The judging page: two answers without names, one key per verdict.

What reaches the browser is `evaluation.pairs.Pair` and nothing else about the pair: no build, no
side, and no machine label before all the expert's own verdicts stand.
"""

from __future__ import annotations

import html
import time
from datetime import datetime
from typing import Any

import streamlit as st
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

import migrations
from capture.settings import Settings
from evaluation.errors import EvaluationError, LabelError
from evaluation.labels import LabelQueue
from evaluation.pairs import Answer, Pair
from evaluation.wording import Span, compare, visible
from replay.database import open_sessions
from replay.errors import DatabaseError
from replay.models import Run

VERDICTS = (
    ("left", "Left is better", "1", ":material/west:"),
    ("same", "No difference", "2", ":material/drag_handle:"),
    ("right", "Right is better", "3", ":material/east:"),
)
SKIP_REASONS = ("outside my field", "cannot be judged from this", "text is damaged")
HISTORY = 20
SIDES = {"left": "left", "right": "right", "same": "no difference"}

STYLE = """
<style>
.il-question { border-left: 3px solid #9AA5B1; padding: 0.1rem 0 0.1rem 0.9rem; }
.il-role { color: #616E7C; font-size: 0.78rem; letter-spacing: 0.04em; text-transform: uppercase; }
.il-text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.55; }
.il-question .il-text { max-height: 11rem; overflow-y: auto; margin-bottom: 0.5rem; }
.il-answer { border: 1px solid #D9DEE5; border-radius: 8px; padding: 0.9rem 1.1rem;
    background: #FFFFFF; min-height: 9rem; max-height: 26rem; overflow-y: auto; }
.il-answer h4 { margin: 0 0 0.5rem 0; font-size: 0.85rem; font-weight: 600; color: #52606D; }
.il-answer mark { background: #FDE7B0; color: inherit; border-radius: 3px; padding: 0.05em 0; }
.il-note { color: #B42318; font-size: 0.85rem; margin-top: 0.6rem; }
</style>
"""


def page() -> None:
    """The whole page."""
    st.title("Judge what changed")
    url = Settings().database
    try:
        sessions = _sessions(url, _stamp(url))
        runs = _runs(sessions)
    except (migrations.MigrationError, DatabaseError) as error:
        st.error(str(error), icon=":material/error:")
        return
    if not runs:
        st.info(
            "There is no replay to judge yet. Make one with `inferloop replay`.",
            icon=":material/hourglass_empty:",
        )
        return
    with st.sidebar:
        run_id = st.selectbox("Replay", list(runs), format_func=runs.__getitem__, key="run")
        name = _who()
    if not name:
        st.info("Enter your name on the left to begin.", icon=":material/person:")
        return
    try:
        queue = LabelQueue(sessions, name, run_id)
        _judge(queue)
    except (EvaluationError, DatabaseError) as error:
        st.error(str(error), icon=":material/error:")


def _who() -> str:
    """The expert's name. Its field goes once it is given: keys are verdicts then, not letters."""
    name = st.session_state.get("name", "")
    if name:
        st.text(f"Judging as {name}")
        if not st.button("Change", key="change"):
            return str(name)
        st.session_state["name"] = ""
        st.rerun()
    typed = st.text_input("Your name", key="expert", placeholder="as it should stand in labels")
    if typed.strip():
        st.session_state["name"] = typed
        st.rerun()
    return ""


def answer_html(title: str, answer: Answer, spans: list[Span]) -> str:
    """One answer as escaped HTML with what differs from the other one marked."""
    body = "".join(
        f"<mark>{html.escape(span.text)}</mark>" if span.changed else html.escape(span.text)
        for span in spans
    )
    note = "" if answer.note is None else f'<div class="il-note">{html.escape(answer.note)}</div>'
    return (
        f'<div class="il-answer"><h4>{html.escape(title)}</h4>'
        f'<div class="il-text">{body}</div>{note}</div>'
    )


def question_html(pair: Pair) -> str:
    """The conversation as escaped HTML."""
    turns = "".join(
        f'<div class="il-role">{html.escape(role)}</div>'
        f'<div class="il-text">{html.escape(visible(text))}</div>'
        for role, text in pair.question
    )
    return f'<div class="il-question">{turns}</div>'


def _judge(queue: LabelQueue) -> None:
    state = _state(queue)
    if state.get("problem"):
        st.warning(state.pop("problem"), icon=":material/info:")
    pair = queue.next()
    progress = queue.progress()
    share = progress.judged / max(progress.judged + progress.remaining, 1)
    st.progress(share, f"{progress.judged} judged by you, {progress.remaining} to go")
    if pair is None:
        st.success("Nothing left to judge in this replay. Thank you.", icon=":material/task_alt:")
    else:
        state["shown"].setdefault(pair.token, time.monotonic())
        _show(pair)
        _verdict_buttons(queue, pair)
    _tools(queue, pair)
    if pair is None:
        _history(queue)


def _show(pair: Pair) -> None:
    left, right = compare(pair.left.text, pair.right.text)
    st.html(STYLE + question_html(pair))
    columns = st.columns(2, gap="medium")
    with columns[0]:
        st.html(answer_html("Left", pair.left, left))
    with columns[1]:
        st.html(answer_html("Right", pair.right, right))


def _verdict_buttons(queue: LabelQueue, pair: Pair) -> None:
    for column, (verdict, text, key, icon) in zip(st.columns(3), VERDICTS, strict=True):
        column.button(
            text,
            key=f"{verdict}-{pair.token}",
            icon=icon,
            shortcut=key,
            width="stretch",
            on_click=_on_verdict,
            args=(queue, pair.token, verdict),
        )


def _tools(queue: LabelQueue, pair: Pair | None) -> None:
    undoable = _state(queue)["undoable"]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if pair is not None:
            st.text_input(
                "Comment (optional)",
                key=f"comment-{pair.token}",
                max_chars=4000,
                placeholder="why; it is kept with your verdict",
            )
            reason = st.selectbox("If you skip, why", SKIP_REASONS, key="reason", width=230)
            st.button(
                "Skip",
                key=f"skip-{pair.token}",
                shortcut="s",
                on_click=_on_skip,
                args=(queue, pair.token, reason),
            )
        st.button(
            "Undo",
            key="undo",
            shortcut="u",
            disabled=undoable is None,
            on_click=_on_undo,
            args=(queue, undoable),
        )


def _history(queue: LabelQueue) -> None:
    """Earlier verdicts beside the machine's, except those that can still be undone.

    Only when nothing is left to judge: hidden checks have no machine label, so each would be known
    by what is missing here, and with it that the rest of its block are none.
    """
    tokens = _state(queue)["revealed"][-HISTORY:]
    rows = [
        {
            "You": SIDES[found.verdict],
            "Machine label (likelihood, no expert)": SIDES[found.machine],
        }
        for found in queue.past(list(reversed(tokens)))
        if found.machine is not None
    ]
    if rows:
        with st.expander(f"You and the machine ({len(rows)})"):
            st.table(rows)


def _state(queue: LabelQueue) -> dict[str, Any]:
    """This browser session's memory for one expert and run; it never leaves the server.

    `undoable` is the newest verdict's token. Machine labels are shown of `revealed` ones only,
    which can no longer be undone: nobody changes a verdict after seeing the machine's.
    """
    fresh: dict[str, Any] = {"shown": {}, "undoable": None, "revealed": []}
    state: dict[str, Any] = st.session_state.setdefault(
        f"judging-{queue.run_id}-{queue.expert}", fresh
    )
    return state


def _on_verdict(queue: LabelQueue, token: str, verdict: str) -> None:
    shown = _state(queue)["shown"].get(token)
    seconds = None if shown is None else round(time.monotonic() - shown, 1)
    comment = st.session_state.get(f"comment-{token}")
    _attempt(queue, lambda: queue.judge(token, verdict, comment=comment, seconds=seconds), token)


def _on_skip(queue: LabelQueue, token: str, reason: str) -> None:
    _attempt(queue, lambda: queue.skip(token, reason), token)


def _on_undo(queue: LabelQueue, token: str) -> None:
    if _attempt(queue, lambda: queue.undo(token), None):
        _state(queue)["shown"][token] = time.monotonic()


def _attempt(queue: LabelQueue, action: Any, undoable: str | None) -> bool:
    """Carry out a click; a click on a pair that is no longer open only says so."""
    state = _state(queue)
    try:
        action()
    except (LabelError, DatabaseError) as error:
        state["problem"] = str(error)
        return False
    if undoable is not None and state["undoable"] is not None:
        state["revealed"].append(state["undoable"])
    state["undoable"] = undoable
    return True


def _runs(sessions: sessionmaker[Session]) -> dict[int, str]:
    """Runs that can be judged, newest first, described without their builds."""
    with sessions() as session:
        rows = session.execute(
            select(Run.id, Run.started_at).where(Run.status == "valid").order_by(Run.id.desc())
        )
        return {run_id: _run_title(run_id, started) for run_id, started in rows}


def _run_title(run_id: int, started: datetime) -> str:
    return f"Run {run_id}, {started:%Y-%m-%d %H:%M} UTC"


@st.cache_resource(max_entries=2, on_release=lambda sessions: sessions.kw["bind"].dispose())
def _sessions(url: str, stamp: tuple[int, int] | None) -> sessionmaker[Session]:
    """Sessions of the whole process. `stamp` changes when the database is another file: verdicts
    must not go into a deleted one."""
    migrations.require_current(url)
    return open_sessions(url)


def _stamp(url: str) -> tuple[int, int] | None:
    file = migrations.sqlite_file(url)
    if file is None or not file.exists():
        return None
    status = file.stat()
    return status.st_dev, status.st_ino
