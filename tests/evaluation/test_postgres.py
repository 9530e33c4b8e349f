"""The judging side on PostgreSQL: blind labels by several experts, gate, policy."""

from __future__ import annotations

import random
from pathlib import Path

import migrations
from evaluation.feedback import FeedbackRules, plan, publish
from evaluation.gate import evaluate, record
from evaluation.gate_policy import GatePolicy
from evaluation.judgements import export, find_run
from evaluation.labels import LabelQueue
from replay.database import now, open_sessions
from tests.evaluation.factory import CLASS, add_run
from tests.migrations.postgres import postgres_server


def test_the_judging_side_works_on_postgresql(tmp_path: Path) -> None:
    with postgres_server() as url:
        migrations.upgrade(url)
        sessions = open_sessions(url)
        add_run(sessions, classes=[CLASS] * 10, unchanged=3, noisy=2)
        for expert in ("ann", "bob"):
            found = LabelQueue(sessions, expert, randomness=random.Random(1))
            while (pair := found.next()) is not None:
                found.judge(pair.token, "left" if "three" in pair.right.text else "right")
            assert found.progress().remaining == 0
        with sessions() as session:
            run = find_run(session)
            report = evaluate(session, run, GatePolicy(min_labels=5, min_experts=2))
            record(session, report)
            policy = plan(session, run, FeedbackRules(), None, now())
            publish(session, tmp_path / "policy.json", policy)
            assert report.tally.harm == 10
            assert policy.policy.classes[CLASS].adjustment < 0
            assert len(list(export(session, run))) >= 20
        sessions.kw["bind"].dispose()
