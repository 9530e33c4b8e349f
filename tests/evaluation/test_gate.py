"""Every decision of the gate, its borders, and that its reports say why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.orm import sessionmaker

from evaluation.criteria import Outcome, harm_rate
from evaluation.errors import GateError
from evaluation.gate import GateReport, evaluate, record
from evaluation.gate_policy import GatePolicy
from evaluation.judgements import find_run
from evaluation.models import Decision
from evaluation.report import render_json, render_junit, render_markdown
from evaluation.tally import Tally
from tests.evaluation.factory import CLASS, add_run, label

DEFAULT = GatePolicy()


def decide(sessions: sessionmaker, policy: GatePolicy = DEFAULT) -> GateReport:
    with sessions() as session:
        return evaluate(session, find_run(session), policy)


def why(report: GateReport, name: str) -> tuple[Outcome, str]:
    (found,) = [item for item in report.criteria if item.name == name]
    return found.outcome, found.explanation


def test_59_harm_free_labels_pass_a_5_percent_bound_and_58_do_not(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 70)
    label(sessions, run_id, [0] * 58)
    report = decide(sessions)
    assert report.outcome is Outcome.INSUFFICIENT
    outcome, explanation = why(report, "harm rate")
    assert outcome is Outcome.INSUFFICIENT
    assert "1 more harm-free label needed: 12 diffs are still unjudged" in explanation
    label(sessions, run_id, [None] * 58 + [1], expert="bob")
    report = decide(sessions)
    assert report.outcome is Outcome.PASS
    assert int(report.outcome) == 0


def test_the_anytime_bound_asks_for_more(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 130)
    label(sessions, run_id, [0] * 59)
    policy = GatePolicy(interval="anytime")
    _, explanation = why(decide(sessions, policy), "harm rate")
    assert explanation.startswith("57 more harm-free labels needed")
    label(sessions, run_id, [None] * 59 + [0] * 57, expert="bob")
    assert decide(sessions, policy).outcome is Outcome.PASS


def test_no_labels_are_not_enough(sessions: sessionmaker) -> None:
    add_run(sessions, classes=[CLASS] * 5)
    report = decide(sessions)
    assert report.outcome is Outcome.INSUFFICIENT
    outcome, explanation = why(report, "labels")
    assert outcome is Outcome.INSUFFICIENT
    assert "30 more needed: the run has 5 unjudged diffs left, so replay more" in explanation


def test_certain_harm_fails(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 100)
    label(sessions, run_id, [-1] * 10 + [0] * 30)
    report = decide(sessions)
    assert report.outcome is Outcome.FAIL
    assert "at least" in why(report, "harm rate")[1]


def test_possible_harm_is_not_certain(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 100)
    label(sessions, run_id, [-1] * 3 + [0] * 37)
    assert decide(sessions).outcome is Outcome.INSUFFICIENT


def test_harm_above_the_limit_with_every_diff_judged_fails(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 40)
    label(sessions, run_id, [-1] * 3 + [0] * 37)
    report = decide(sessions)
    assert report.outcome is Outcome.FAIL
    assert "all diffs are judged" in why(report, "harm rate")[1]


def test_an_invalid_run_is_neither_pass_nor_fail(sessions: sessionmaker) -> None:
    run_id = add_run(
        sessions, classes=[CLASS] * 60, status="invalid", reason="lateness p99 800 ms > 250 ms"
    )
    label(sessions, run_id, [-1] * 60)
    report = decide(sessions)
    assert int(report.outcome) == 3
    assert "lateness p99 800 ms > 250 ms" in why(report, "valid run")[1]


@pytest.mark.parametrize(("noisy", "outcome"), [(10, Outcome.PASS), (11, Outcome.INVALID)])
def test_a_noisy_old_build_invalidates_the_run(
    sessions: sessionmaker, noisy: int, outcome: Outcome
) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60, unchanged=40, noisy=noisy)
    label(sessions, run_id, [0] * 60)
    report = decide(sessions)
    assert why(report, "A/A noise")[0] is outcome
    assert report.outcome is outcome


@pytest.mark.parametrize(("slower", "outcome"), [(1.2, Outcome.PASS), (1.25, Outcome.FAIL)])
def test_latency_regressions_fail(sessions: sessionmaker, slower: float, outcome: Outcome) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60, slower=slower)
    label(sessions, run_id, [0] * 60)
    report = decide(sessions)
    assert report.outcome is outcome
    assert why(report, "median TTFT")[0] is why(report, "median TPOT")[0] is outcome
    assert decide(sessions, GatePolicy(max_latency_ratio=None)).outcome is Outcome.PASS


def test_a_slowdown_within_the_noise_is_not_a_failure_but_no_pass(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60)
    label(sessions, run_id, [0] * 60)
    with sessions() as session:
        run = find_run(session)
        entry = {"metric": "ttft_ms", "old": 50.0, "new": 90.0, "verdict": "no change shown"}
        run.summary = {"latency": [entry]}
        session.commit()
    outcome, explanation = why(decide(sessions), "median TTFT")
    assert outcome is Outcome.INSUFFICIENT
    assert "no change shown beyond A/A noise" in explanation


def test_unmeasured_latency_is_missing_evidence(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60)
    label(sessions, run_id, [0] * 60)
    with sessions() as session:
        find_run(session).summary = {}
        session.commit()
    assert why(decide(sessions), "latency")[0] is Outcome.INSUFFICIENT


def test_what_the_old_build_does_not_repeat_is_no_change(sessions: sessionmaker) -> None:
    add_run(sessions, classes=[CLASS] * 40, noisy=3)
    report = decide(sessions)
    assert (report.tally.diffs, report.noisy) == (37, 3)
    assert "3 more requests differ" in render_markdown(report)


def test_machine_labels_do_not_count_unless_the_policy_says_so(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60)
    label(sessions, run_id, [0] * 60, expert="machine:ref", kind="machine")
    report = decide(sessions)
    assert report.outcome is Outcome.INSUFFICIENT
    assert report.tally.judged == 0
    accepting = decide(sessions, GatePolicy(accept_machine=True))
    assert accepting.outcome is Outcome.PASS
    assert accepting.tally.machine == 60
    assert "60 of these verdicts are a machine's" in render_markdown(accepting)


def test_an_experts_verdict_outranks_the_machines(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 3)
    label(sessions, run_id, [-1, -1, -1], expert="machine:ref", kind="machine")
    label(sessions, run_id, [1], expert="ann")
    tally = decide(sessions, GatePolicy(accept_machine=True)).tally
    assert (tally.benefit, tally.harm, tally.machine) == (1, 2, 2)


def test_min_experts_and_disputes(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60)
    for expert, first in (("ann", -1), ("bob", 0), ("cem", 1)):
        label(sessions, run_id, [first] + [0] * 59, expert=expert)
    report = decide(sessions, GatePolicy(min_experts=3))
    assert (report.tally.judged, report.tally.disputed, report.tally.disputed_harm) == (60, 1, 1)
    assert len(report.disputes) == 1
    assert report.outcome is Outcome.INSUFFICIENT, "disputed harm counts until adjudicated"
    label(sessions, run_id, [0], expert="dan")
    assert decide(sessions, GatePolicy(min_experts=3)).outcome is Outcome.PASS
    assert decide(sessions, DEFAULT.model_copy(update={"min_experts": 5})).tally.judged == 0


def test_one_harmed_class_fails_a_release_that_is_fine_on_average(sessions: sessionmaker) -> None:
    classes = ["beta/chat/-"] * 8 + [CLASS] * 392
    run_id = add_run(sessions, classes=classes)
    label(sessions, run_id, [-1] * 6 + [0] * 394)
    report = decide(sessions)
    assert why(report, "harm rate")[0] is Outcome.PASS
    assert why(report, "harm by class") == (Outcome.FAIL, "harmed: beta/chat/-")
    assert report.outcome is Outcome.FAIL


def test_a_release_that_changes_nothing_passes_on_enough_requests(sessions: sessionmaker) -> None:
    add_run(sessions, classes=[], unchanged=29)
    assert decide(sessions).outcome is Outcome.INSUFFICIENT
    add_run(sessions, classes=[], unchanged=30)
    assert decide(sessions).outcome is Outcome.PASS


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 400))
def test_more_harm_never_makes_the_harm_rate_look_better(harm: int, more: int, rest: int) -> None:
    def outcome(harms: int) -> Outcome:
        total = harm + more + rest
        counts = Tally(total + 1, harms, total - harms, 0, 0, 0, 0)
        return harm_rate(counts, DEFAULT).outcome

    order = [Outcome.PASS, Outcome.INSUFFICIENT, Outcome.FAIL]
    assert order.index(outcome(harm)) <= order.index(outcome(harm + more))


def test_a_bound_at_the_limit_is_no_certain_harm() -> None:
    """One of one harmful is "at least 5 %" with 95 % confidence; more are to be judged."""
    counts = Tally(9, 1, 0, 0, 0, 0, 0)
    assert harm_rate(counts, DEFAULT).outcome is Outcome.INSUFFICIENT


def test_the_decision_is_kept_with_its_report(sessions: sessionmaker) -> None:
    run_id = add_run(sessions)
    report = decide(sessions)
    with sessions() as session:
        record(session, report)
        session.commit()
        kept = session.scalars(select(Decision)).one()
    assert (kept.run_id, kept.exit_code) == (run_id, 2)
    assert kept.report == json.loads(render_json(report))
    assert kept.report["outcome"] == "insufficient"


def test_junit_has_a_case_per_criterion_and_class(sessions: sessionmaker) -> None:
    strange = 'a<b>&"\x00]]>/chat/-'
    run_id = add_run(sessions, classes=[CLASS] * 80 + [strange] * 2 + ["beta/chat/-"] * 14)
    label(sessions, run_id, [0] * 80 + [None] * 2 + [-1] * 14)
    root = ElementTree.fromstring(render_junit(decide(sessions)))
    criteria, classes = root.findall("testsuite")
    assert classes.get("tests") == "3"
    assert (classes.get("failures"), classes.get("skipped")) == ("1", "1")
    names = {case.get("name"): case for case in classes}
    assert names['a<b>&"\ufffd]]>/chat/-'].find("skipped") is not None
    assert names["beta/chat/-"].find("failure").get("type") == "harm"
    assert names[CLASS].find("failure") is None
    types = {case.get("name"): case.find("failure") for case in criteria}
    assert types["harm rate"].get("type") == "failed"
    assert int(root.get("failures")) == int(classes.get("failures")) + int(criteria.get("failures"))


def test_junit_of_an_invalid_run_is_an_error(sessions: sessionmaker) -> None:
    add_run(sessions, status="invalid", reason="too late")
    root = ElementTree.fromstring(render_junit(decide(sessions)))
    assert root.get("errors") == "1"


def test_markdown_says_the_decision_first_and_escapes_tables(sessions: sessionmaker) -> None:
    run_id = add_run(sessions, classes=["a|b/chat/-"] * 40)
    label(sessions, run_id, [0] * 40)
    text = render_markdown(decide(sessions))
    assert text.startswith("# Release gate: NOT ENOUGH EVIDENCE\n")
    assert "19 more harm-free labels needed" in text
    assert "| a\\|b/chat/- | not enough" in text
    assert "## Experts" in text


def test_markdown_takes_no_markup_from_names(sessions: sessionmaker) -> None:
    names = ["`|`|b", "a\\|b", "![x](http://h/y.png)", "<img src=x>/r", "a\n# b/r", "\x1b[31m/r"]
    run_id = add_run(sessions, classes=[*names, CLASS])
    label(sessions, run_id, [-1] * 7, expert="[ann](http://h)")
    text = render_markdown(decide(sessions, GatePolicy(max_harm_rate=0.01)))
    assert text.count(f"`{CLASS}`") == 1
    assert not re.search(r"(?<!\\)\[|<img|\n# b|\x1b", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?:\\.|[^|\\])+", row.strip("|"))) for row in rows]
    assert set(cells[:9]) == {5}
    assert set(cells[9:18]) == {6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gate]\nmax_harm_rate = 0", "max_harm_rate = 0"),
        ("[gate]\nmax_harm = 0.1", "unknown key max_harm; known are max_harm_rate"),
        ("[gate]\ninterval = 'wald'", "interval = 'wald'"),
        ("max_harm_rate = 0.1", r"exactly one table, \[gate\]"),
        ("[gate]\nmin_labels = true", "min_labels = True"),
        ("[gate]\nmin_labels = '30'", "min_labels = '30'"),
        ("[gate]\naccept_machine = 'no'", "accept_machine = 'no'"),
        ("[gate]\nmax_latency_ratio = nan", "max_latency_ratio = nan"),
        ("[gate", "is not TOML"),
    ],
)
def test_bad_policies_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(text)
    with pytest.raises(GateError, match=message) as caught:
        GatePolicy.load(path)
    assert caught.value.exit_code == 3
    with pytest.raises(GateError, match="cannot read"):
        GatePolicy.load(tmp_path / "missing.toml")


def test_a_policy_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text("[gate]\nmax_harm_rate = 0.02\nmin_experts = 3\nmax_latency_ratio = inf\n")
    policy = GatePolicy.load(path)
    assert policy.max_latency_ratio is None
    assert (policy.max_harm_rate, policy.min_experts, policy.accept_machine) == (0.02, 3, False)
