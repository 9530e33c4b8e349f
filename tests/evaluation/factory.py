"""Runs with known diffs and labels, in a database of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

import migrations
from evaluation.labels import expert_named
from evaluation.models import Label
from replay.database import open_sessions
from replay.models import Build, Diff, ReplayedRequest, Run

OLD_NAME = "falcon-int8-baseline"
NEW_NAME = "osprey-int4-candidate"
CLASS = "acme/chat/-"


def fresh_sessions(tmp_path: Path) -> sessionmaker[Session]:
    url = f"sqlite:///{tmp_path / 'inferloop.sqlite'}"
    migrations.upgrade(url)
    return open_sessions(url)


def add_run(
    sessions: sessionmaker[Session],
    *,
    classes: Sequence[str] = (CLASS,) * 10,
    unchanged: int = 0,
    noisy: int = 0,
    status: str = "valid",
    reason: str | None = None,
    slower: float = 1.0,
) -> int:
    """A run with one changed request per entry of `classes` and `unchanged` requests more.

    The last `noisy` A/A pairs differ; the new build takes `slower` times as long. Returns its
    number.
    """
    with sessions() as session:
        run = Run(
            old_build=_build(session, OLD_NAME),
            new_build=_build(session, NEW_NAME),
            traffic_file="traffic.jsonl",
            traffic_digest="d" * 64,
            status=status,
            reason=reason,
            summary={"latency": [_latency("ttft_ms", slower), _latency("tpot_ms", slower)]},
        )
        session.add(run)
        for index, class_key in enumerate([*classes, *[CLASS] * unchanged]):
            _add_request(
                session,
                run,
                index,
                class_key,
                changed=index < len(classes),
                noisy=index >= len(classes) + unchanged - noisy,
            )
        session.commit()
        return run.id


def label(
    sessions: sessionmaker[Session],
    run_id: int,
    values: Sequence[int | None],
    *,
    expert: str = "ann",
    kind: str = "expert",
) -> None:
    """Labels on the run's changed diffs in the order they were added; None leaves one out."""
    with sessions() as session:
        who = expert_named(session, expert, kind)
        diffs = (
            session.query(Diff)
            .filter_by(run_id=run_id, pair="change")
            .filter(Diff.kind != "same")
            .order_by(Diff.id)
        )
        for diff, value in zip(diffs, values, strict=False):
            if value is not None:
                session.add(Label(diff_id=diff.id, expert_id=who.id, value=value))
        session.commit()


def _latency(metric: str, slower: float) -> dict[str, object]:
    verdict = "slower" if slower > 1 else "no change shown"
    return {"metric": metric, "old": 50.0, "new": 50.0 * slower, "verdict": verdict}


def _build(session: Session, name: str) -> Build:
    found = session.query(Build).filter_by(name=name).one_or_none()
    if found is None:
        found = Build(name=name, fingerprint=name.encode().hex(), components={})
        session.add(found)
    return found


def _add_request(
    session: Session, run: Run, index: int, class_key: str, *, changed: bool, noisy: bool
) -> None:
    texts = {
        "old_a": f"Answer {index} is forty-two.",
        "old_b": f"Answer {index} is forty two." if noisy else f"Answer {index} is forty-two.",
        "new": f"Answer {index} is forty-three." if changed else f"Answer {index} is forty-two.",
    }
    arms = {
        arm: ReplayedRequest(
            run=run,
            arm=arm,
            request_id=f"{index:032x}",
            class_key=class_key,
            status=200,
            output_text=text,
            finish_reason="stop",
            scheduled_ms=0.0,
            sent_ms=0.0,
        )
        for arm, text in texts.items()
    }
    session.add_all(arms.values())
    session.flush()
    for pair, right in (("change", "new"), ("noise", "old_b")):
        session.add(
            Diff(
                run=run,
                pair=pair,
                request_id=f"{index:032x}",
                class_key=class_key,
                kind="same" if texts[right] == texts["old_a"] else "output",
                left_id=arms["old_a"].id,
                right_id=arms[right].id,
                input={"messages": [{"role": "user", "content": f"Question {index}?"}]},
            )
        )
