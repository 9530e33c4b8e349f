"""Exactly one thing goes wrong for a request: `why` must say which, and how much it cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import pytest

from capture.why.macro import why_query
from tests.capture.stage import Stage
from tests.capture.why.plays import BEFORE, FIRSTS, GAPS, SUBJECT

Rows = dict[int | None, dict[str, Any]]
Why = Callable[..., Rows]


@pytest.fixture(scope="module")
def verdicts(lake: duckdb.DuckDBPyConnection) -> dict[tuple[str, int], Rows]:
    """Everything about everybody in one query, by request id and slot."""
    relation = lake.execute(why_query("true"))
    names = [column[0] for column in relation.description]
    found: dict[tuple[str, int], Rows] = {}
    for values in relation.fetchall():
        row = dict(zip(names, values, strict=True))
        found.setdefault((row["request_id"], row["slot"]), {})[row["position"]] = row
    return found


@pytest.fixture
def why(verdicts: dict[tuple[str, int], Rows], stages: dict[str, Stage]) -> Why:
    def rows(play: str, slot: int = SUBJECT) -> Rows:
        return verdicts[stages[play].players[slot].request_id.hex, slot]

    return rows


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_has_the_one_cause_that_was_injected(why: Why, name: str) -> None:
    _, cause, evidence, lost_ms = GAPS[name]
    rows = why(f"gap: {name}")
    gaps = [row for row in rows.values() if row["position"] != 0]
    assert [row["cause"] for row in gaps] == [cause]
    assert evidence in gaps[0]["evidence"]
    assert "also" not in gaps[0]["evidence"]
    assert gaps[0]["explained_ms"] == pytest.approx(lost_ms, rel=0.1)
    assert gaps[0]["usual_ms"] == pytest.approx(3.0, rel=0.05)
    assert gaps[0]["latency_ms"] - gaps[0]["usual_ms"] == pytest.approx(lost_ms, rel=0.2)


@pytest.mark.parametrize("name", FIRSTS)
def test_a_first_token_has_the_one_cause_that_was_injected(why: Why, name: str) -> None:
    _, cause, evidence = FIRSTS[name]
    rows = why(f"first: {name}")
    assert set(rows) == {0}
    assert rows[0]["cause"] == cause
    assert evidence in rows[0]["evidence"]
    assert rows[0]["explained_ms"] <= rows[0]["latency_ms"] + 0.01


def test_the_evidence_names_who_was_involved(why: Why, stages: dict[str, Stage]) -> None:
    def of(play: str, slot: int) -> str:
        return str(stages[play].players[slot].request_id)[:8]

    queued = why("first: queued")[0]["evidence"]
    assert f"{of('first: queued', 2)} (tenant busy, busy/chat/-, 12 + " in queued
    assert f"{of('first: queued', 3)} (tenant vip, vip/chat/-" in queued
    assert "priority 90" in queued
    assert "1 of them came later, 1 with a higher priority" in queued
    assert "its priority was 40, -10 of it by the feedback policy" in queued
    shared = why("gap: prefill")[BEFORE + 1]["evidence"]
    assert f"{of('gap: prefill', 7)} (tenant bulk, bulk/chat/-, prompt of 700)" in shared
    evidence = why("gap: preempted")[BEFORE + 1]["evidence"]
    assert f"{of('gap: preempted', 7)} (tenant vip, vip/chat/-, prompt of 20" in evidence
    assert "KV cache 90 of 100 blocks" in evidence


def test_steady_gaps_need_no_explanation(why: Why) -> None:
    assert set(why("steady")) == {0}
    assert set(why("jitter")) == {0}, "8 % more or less is no event"


def test_what_the_trace_does_not_say_is_not_made_up(why: Why) -> None:
    gap = why("lost")[BEFORE + 1]
    assert (gap["cause"], gap["evidence"]) == ("unexplained", "its steps are not in the lake")
    assert gap["explained_ms"] == 0
    for row in why("proxy").values():
        assert row["cause"] == "unexplained"
        assert "the upstream's steps are not visible" in row["evidence"]


def test_slow_sending_is_a_row_of_its_own(why: Why) -> None:
    row = why("sending", SUBJECT + 2)[None]
    assert row["cause"] == "sending slow"
    assert row["latency_ms"] == pytest.approx(905, abs=1)
    assert "900.0 ms until the last chunk was serialized" in row["evidence"]
    assert None not in why("sending", SUBJECT)


def test_a_missed_prefix_costs_its_share_of_the_prefill(why: Why) -> None:
    row = why("first: prefix miss")[0]
    assert row["explained_ms"] == pytest.approx(0.9 * row["latency_ms"], rel=0.05)
    assert [share["cause"] for share in row["causes"][:2]] == ["prefix miss", "prefill"]


def test_of_two_causes_the_larger_is_the_verdict(why: Why) -> None:
    row = why("two causes")[BEFORE + 1]
    assert row["cause"] == "host slow"
    assert "; also device slow (forward time 10.7 ms" in row["evidence"]
    assert [share["cause"] for share in row["causes"]] == ["host slow", "device slow"]
    assert [share["ms"] for share in row["causes"]] == pytest.approx([14, 8], rel=0.02)


def test_two_calls_that_share_a_trace_id_are_explained_apart(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    identity = str(stages["shared id"].players[SUBJECT].request_id)
    rows = lake.execute("SELECT slot, position, cause FROM why(?)", [identity]).fetchall()
    assert rows == [
        (SUBJECT, 0, "prefill"),
        (SUBJECT, 41, "host slow"),
        (SUBJECT + 1, 0, "prefill"),
        (SUBJECT + 1, 41, "device slow"),
    ]


@pytest.mark.parametrize(
    "form", ["{hex}", "{uuid}", "chatcmpl-{hex}", "cmpl-{HEX}", " {hex} ", "{start}", "{trace}"]
)
def test_every_form_of_an_id_that_clients_see_is_understood(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage], form: str
) -> None:
    identity = stages["steady"].players[SUBJECT].request_id
    forms = {
        "hex": identity.hex,
        "HEX": identity.hex.upper(),
        "uuid": str(identity),
        "start": identity.hex[:8],
        "trace": f"00-{identity.hex}-00f067aa0ba902b7-01",
    }
    asked = lake.execute("SELECT DISTINCT request_id FROM why(?)", [form.format(**forms)])
    assert asked.fetchall() == [(identity.hex,)]


def test_too_short_a_beginning_and_unknown_ids_find_nothing(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    identity = stages["steady"].players[SUBJECT].request_id
    for text in (identity.hex[:7], "", "no such request", "%", "chatcmpl-"):
        assert lake.execute("FROM why(?)", [text]).fetchall() == []
