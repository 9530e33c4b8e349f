"""`inferloop why`: finding requests, the report on one screen, the command's answers."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import duckdb
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from capture.frames import TraceWriter
from capture.lake import open_connection
from capture.reader import RingReader
from capture.ring import RingWriter
from capture.rings.attendance import Attendance
from capture.why.lookup import (
    EVER,
    Ranking,
    Subject,
    WhyError,
    ambiguous,
    find,
    parse_since,
    slowest,
    unknown,
)
from capture.why.macro import CAUSES
from capture.why.report import BLOCKS, Explanation, duration, explain, plain, render
from cli.main import app, load_commands
from tests.capture.lakes import commit_rings
from tests.capture.rings import new_ring, write_request, write_step
from tests.capture.stage import Clock, Stage
from tests.capture.why.plays import (
    ABORTED,
    FAILED,
    GAPS,
    LOST_MS,
    NONE,
    ONE,
    RUNNING,
    SUBJECT,
)

NOW = datetime(2026, 3, 1, 12)

load_commands()


def of(lake: duckdb.DuckDBPyConnection, stage: Stage, slot: int = SUBJECT) -> Explanation:
    (explanation,) = explain(lake, find(lake, str(stage.players[slot].request_id)))
    return explanation


def screen(explanation: Explanation, width: int = 120) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(render(explanation))
    return captured.get()


def test_a_report_has_header_timeline_causes_and_verdict(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    stage = stages["gap: prefill"]
    text = screen(of(lake, stage))
    assert f"request {stage.players[SUBJECT].request_id.hex}" in text
    assert "tenant acme · class acme/chat/- · priority 50 · tiny on engine" in text
    assert "finished (length) · 12 prompt tokens (0 cached), 122 output tokens" in text
    assert all(name in text for name in ("queue ", "TTFT ", "TPOT ", "sending ", "duration "))
    (line,) = [line for line in text.splitlines() if line.startswith("gaps ")]
    assert line.count(BLOCKS[-1]) == 1
    assert line.count(BLOCKS[0]) > 50
    words = " ".join(text.split())
    assert "shared a step with a prefill: 700 prompt tokens of" in words
    assert "ms it waited went to: shared a step with a prefill" in words
    assert len(text.splitlines()) < 24, "one screen"


def test_lost_time_is_summed_by_cause_and_never_more_than_was_lost(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    identities = [stages[f"gap: {name}"].players[SUBJECT].request_id for name in GAPS]
    subjects = [found for identity in identities for found in find(lake, str(identity))]
    for name, explanation in zip(GAPS, explain(lake, subjects), strict=True):
        lost = explanation.lost_ms()
        assert sum(lost.values()) == pytest.approx(sum(s.lost_ms for s in explanation.slow))
        assert next(iter(lost)) == GAPS[name][1], name
        assert lost.get("unexplained", 0.0) < 0.1 * sum(lost.values()), name


def test_requests_that_did_not_end_well_are_told_apart(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    players = stages["ends"].players
    slots = (FAILED, ABORTED, ONE, NONE, RUNNING)
    subjects = [found for slot in slots for found in find(lake, str(players[slot].request_id))]
    failed, aborted, one, none, running = explain(lake, subjects)
    assert "failed" in screen(failed)
    assert "aborted" in screen(aborted)
    assert (one.gaps_ms, [s.position for s in one.slow]) == ([], [0])
    assert "gaps" not in screen(one)
    assert "aborted" in screen(none)
    assert "it got no token" in screen(none)
    assert running.subject.outcome == "engine_gone"
    assert "its engine ended before it did" in screen(running)
    assert [s.cause for s in running.slow] == ["prefill", "device slow"]


def test_a_request_that_still_runs_is_explained_as_far_as_it_got(tmp_path: Path) -> None:
    ring = new_ring(tmp_path / "rings")
    trace = TraceWriter(ring)
    trace.engine({"model": "tiny"})
    identity, waiting = write_request(trace, 0), write_request(trace, 1)
    write_step(trace, 0, 1, phase=1, position=0)
    place = commit_rings(tmp_path)
    with open_connection(place) as lake:
        running, empty = explain(lake, [*find(lake, identity), *find(lake, waiting)])
        assert running.subject.outcome == "unfinished"
        assert "still running" in screen(running)
        assert "no token yet" in screen(empty)
    ring.close()


def test_the_slowest_are_found_by_each_figure(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    def first(by: Ranking) -> str:
        return slowest(lake, 1, by=by)[0].request_id

    assert first(Ranking.ttft) == stages["first: slow server"].players[SUBJECT].request_id.hex
    assert first(Ranking.duration) == stages["sending"].players[SUBJECT + 2].request_id.hex
    gaps = slowest(lake, 3, by=Ranking.gap)
    assert gaps[0].request_id == stages["gap: preempted"].players[SUBJECT].request_id.hex
    assert len(slowest(lake, 7)) == 7
    assert slowest(lake, 7, since=datetime(2100, 1, 1)) == []


def test_a_beginning_that_several_requests_share_lists_them(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    subjects = slowest(lake, 12)
    message = str(ambiguous("abcdef12", subjects))
    assert "12 requests begin with 'abcdef12'" in message
    assert subjects[0].request_id in message
    assert "and 2 more" in message


@pytest.mark.parametrize("text", ["", "abc", "chatcmpl-", "not-an-id-at-all", "'; DROP", "f" * 33])
def test_what_is_no_id_is_refused_with_the_forms_there_are(
    lake: duckdb.DuckDBPyConnection, text: str
) -> None:
    with pytest.raises(WhyError, match="X-Request-Id"):
        find(lake, text)


def test_an_unknown_id_says_why_that_may_be(
    lake: duckdb.DuckDBPyConnection, home: Path, tmp_path: Path
) -> None:
    message = str(unknown(lake, "ab" * 16, tmp_path))
    assert "ask again in 2 s" in message
    assert "the newest ones are" in message
    assert "collect" not in message
    ring = RingWriter.create(tmp_path / "x.ring", capacity_bytes=1 << 20, engine_id=uuid4())
    TraceWriter(ring).mark("not yet in the lake")
    message = str(unknown(lake, "ab" * 16, tmp_path))
    assert "that no collector reads: 1;" in message
    assert "is `inferloop collect` running?" in message
    reader = RingReader(ring.path)
    Attendance(ring.path, "collector").report(reader.cursor, reader.lag_bytes)
    assert "collect" not in str(unknown(lake, "ab" * 16, tmp_path)), "it is about to read them"
    ring.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        (" 10 m", NOW - timedelta(minutes=10)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("2d", NOW - timedelta(days=2)),
        ("99999d", EVER),
        ("99999999999999d", EVER),
        ("2026-01-31", datetime(2026, 1, 31)),
        ("2026-01-31T12:00+02:00", datetime(2026, 1, 31, 10)),
    ],
)
def test_since_is_an_age_or_a_date(text: str, expected: datetime) -> None:
    assert parse_since(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "10", "yesterday", "-5m", "10w"])
def test_another_since_is_refused(text: str) -> None:
    with pytest.raises(WhyError, match="90s, 10m, 2h, 1d"):
        parse_since(text, NOW)


def test_times_read_well_and_names_steer_no_terminal() -> None:
    assert [duration(ms) for ms in (0.1234, 3.6, 99.9, 1234.5, 61_000)] == [
        "0.123 ms",
        "3.6 ms",
        "99.9 ms",
        "1,234 ms",
        "61.0 s",
    ]
    assert plain("a\x1b[31mb") == "a\N{REPLACEMENT CHARACTER}[31mb"


def run(home: Path, *arguments: str) -> Result:
    environment = {
        "INFERLOOP_HOME": str(home),
        "INFERLOOP_RING_DIR": str(home / "rings"),
        "COLUMNS": "120",
    }
    return CliRunner().invoke(app, ["why", *arguments], env=environment)


def test_the_command_prints_a_report_or_json(
    home: Path, lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    identity: UUID = stages["gap: device"].players[SUBJECT].request_id
    report = run(home, f"chatcmpl-{identity.hex}")
    assert report.exit_code == 0, report.output
    assert "device slow: device time 29.6 ms" in " ".join(report.stdout.split())
    answer = json.loads(run(home, identity.hex[:12], "--json").stdout)
    assert answer["request"]["request_id"] == identity.hex
    assert answer["slow"][-1]["cause"] == "device slow"
    assert answer["lost_ms"]["device slow"] == pytest.approx(LOST_MS, rel=0.1)
    assert len(answer["gaps_ms"]) == answer["request"]["output_tokens"] - 1
    first, _ = run(home, "--slowest", "2", "--by", "gap", "--json").stdout.splitlines()
    assert json.loads(first)["slow"][-1]["cause"] == "preempted"


def test_of_many_requests_under_one_id_the_slowest_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = UUID("4bf92f3577b34da6a3ce929d0e0e4736")
    clock = Clock()
    monkeypatch.setattr("capture.ring.time", clock)
    ring = new_ring(tmp_path / "rings")
    stage = Stage(TraceWriter(ring), clock)
    for slot in range(14):
        stage.arrive(slot, request_id=identity)
        stage.step((), {slot: 12})
        stage.run((slot,), 60 - slot)
        stage.finish(slot)
    ring.close()
    commit_rings(tmp_path)
    report = run(tmp_path, identity.hex).stdout
    assert report.count(f"request {identity.hex}") == 10
    assert "61 output tokens" in report
    assert "50 output tokens" not in report
    assert "the slowest 10 of 14 requests under this id" in report
    assert len(run(tmp_path, identity.hex, "--json").stdout.splitlines()) == 14


def test_the_commands_errors_are_clear(home: Path, tmp_path: Path) -> None:
    assert "no request 'abab" in str(run(home, "ab" * 16).exception)
    assert "there is no trace lake" in str(run(tmp_path, "ab" * 16).exception)
    assert "no request since 2100" in str(
        run(home, "--slowest", "3", "--since", "2100-01-01").exception
    )
    for wrong in ([], ["ab" * 16, "--slowest", "3"], ["ab" * 16, "--by", "gap"]):
        assert run(home, *wrong).exit_code == 2


def test_the_documentation_explains_every_cause() -> None:
    page = (Path(__file__).parents[3] / "docs" / "why.md").read_text()
    for cause in CAUSES:
        assert f"\n| {cause} |" in page


def test_a_subject_whose_counts_are_unknown_is_shown(
    lake: duckdb.DuckDBPyConnection, stages: dict[str, Stage]
) -> None:
    found = of(lake, stages["proxy"])
    values = {**found.subject.__dict__, "prompt_tokens": None, "cached_tokens": None}
    text = screen(Explanation(Subject(**values), found.gaps_ms, found.slow))
    assert "unknown prompt tokens, 122 output tokens" in text
    assert "tiny on proxy" in text
    assert "the upstream's steps are not visible" in text
