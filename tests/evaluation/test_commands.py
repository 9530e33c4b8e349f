"""The commands: exit codes that CI can rely on, one clear line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

import cli.db
import cli.feedback
import cli.gate
import cli.label
import cli.replay  # noqa: F401 - registers its commands
from cli.main import run
from engine.priorities import Policy
from evaluation.models import Decision, Label
from replay.database import create_database_engine
from replay.models import Diff, Run
from tests.evaluation.factory import CLASS, NEW_NAME, OLD_NAME, add_run, label
from tests.waiting import PATIENCE_S

Sessions = sessionmaker[Session]


@pytest.fixture
def inferloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command in `tmp_path`; returns exit code, standard output and standard error."""
    monkeypatch.setenv("INFERLOOP_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inferloop", *arguments])
        code = 0
        try:
            run()
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("values", "options", "code"),
    [
        ([0] * 60, {}, 0),
        ([-1] * 20 + [0] * 40, {}, 1),
        ([], {}, 2),
        ([0] * 60, {"status": "invalid", "reason": "late"}, 3),
    ],
)
def test_the_exit_code_is_the_decision(
    inferloop, sessions: Sessions, values, options, code: int
) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 60, **options)
    label(sessions, run_id, values)
    found, out, _ = inferloop("gate")
    assert found == code
    assert f"exit code {code}" in out
    with sessions() as session:
        assert session.scalars(select(Decision.exit_code)).all() == [code]


def test_gate_writes_its_reports(inferloop, sessions: Sessions, tmp_path: Path) -> None:
    add_run(sessions)
    Path("gate.toml").write_text("[gate]\nmin_labels = 7\n")
    flags = ("--markdown", "g.md", "--junit", "g.xml", "--json", "g.json")
    assert inferloop("gate", "1", "--policy", "gate.toml", *flags)[0] == 2
    assert Path("g.md").read_text().startswith("# Release gate: NOT ENOUGH EVIDENCE")
    assert ElementTree.parse("g.xml").getroot().tag == "testsuites"
    assert json.loads(Path("g.json").read_text())["policy"]["min_labels"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gate", "9"), "there is no run 9"),
        (("gate", "--policy", "absent.toml"), "cannot read the gate policy absent.toml"),
        (("gate", "--markdown", "no/such/dir.md"), "cannot write the report"),
        (("gate", "--bogus"), "No such option"),
        (("gate", "three"), "Invalid value for 'run'"),
        (("gate", "9" * 30), "cannot use the database"),
    ],
)
def test_a_gate_that_cannot_decide_exits_with_3(
    inferloop, sessions: Sessions, arguments, message: str
) -> None:
    add_run(sessions)
    code, out, err = inferloop(*arguments)
    assert code == 3
    assert message in out + err


def test_a_gate_that_breaks_exits_with_3_in_one_line(
    inferloop, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = add_run(sessions)
    with sessions() as session:
        session.get_one(Run, run_id).summary = {"latency": [{"metric": "ttft_ms"}]}
        session.commit()
    code, _, err = inferloop("gate")
    assert (code, err) == (3, "inferloop: KeyError: 'old'\n")
    monkeypatch.setenv("INFERLOOP_MIRROR_SHARE", "much")
    code, _, err = inferloop("gate")
    assert (code, len(err.splitlines())) == (3, 1)


def test_a_reader_who_leaves_does_not_change_the_decision(
    sessions: Sessions, tmp_path: Path
) -> None:
    add_run(sessions)
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "gate"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"INFERLOOP_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    try:
        assert process.wait(PATIENCE_S) == 2
    finally:
        process.kill()


def test_nothing_recorded_can_drive_the_terminal(
    inferloop, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b]0;owned\x07\x9b31m[red]x[/red]"
    run_id = add_run(sessions, classes=[f"t{evil}/r/-"] * 20)
    with sessions() as session:
        run = session.get_one(Run, run_id)
        run.traffic_file, run.reason = f"t{evil}", evil
        for diff in session.scalars(select(Diff)):
            diff.input = {"messages": [{"role": f"user{evil}", "content": evil}]}
            diff.detail = {"finish_reason": [evil, evil], "error": [evil, None]}
            diff.left.output_text, diff.right.output_text = evil, f"{evil}."
        session.commit()
    label(sessions, run_id, [-1] * 20)
    monkeypatch.setattr("typer.prompt", lambda *args, **kwargs: "q")
    for command in (
        ("replay", "show"), ("replay", "show", "--diff", "1"), ("replay", "list"),
        ("label", "next", "--expert", "bob"), ("label", "next", "--json"), ("label", "list"),
        ("label", "export"), ("gate",), ("feedback", "publish"), ("feedback", "show"),
    ):  # fmt: skip
        _, out, err = inferloop(*command)
        assert out or command[-1] == "export"
        assert not {"\x1b", "\x07", "\x9b"} & set(out + err), command
        if command in (("label", "list"), ("feedback", "publish"), ("replay", "show")):
            assert "[red]" in out


def test_a_foreign_schema_is_refused_and_a_fresh_database_made(inferloop, tmp_path: Path) -> None:
    code, _, err = inferloop("gate")
    assert (code, "no run yet" in err) == (3, True)
    engine = create_database_engine(f"sqlite:///{tmp_path / 'inferloop.sqlite'}")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    for command in (("label", "list"), ("feedback", "publish"), ("gate",)):
        code, _, err = inferloop(*command)
        assert code in (1, 3)
        assert "upgrade inferloop" in err
        assert len(err.splitlines()) == 1


def test_a_pair_by_script(inferloop, sessions: Sessions) -> None:
    add_run(sessions, classes=[CLASS] * 2)
    code, out, _ = inferloop("label", "next", "--expert", "ann", "--json")
    pair = json.loads(out)
    assert code == 0
    assert OLD_NAME not in out
    assert NEW_NAME not in out
    assert inferloop("label", "add", pair["token"], "left", "--expert", "ann")[0] == 0
    code, _, err = inferloop("label", "add", pair["token"], "left", "--expert", "ann")
    assert (code, "undo it first" in err) == (1, True)
    code, _, err = inferloop("label", "add", pair["token"], "worse", "--expert", "ann")
    assert (code, "use left, right or same" in err) == (1, True)
    out = inferloop("label", "export")[1]
    (record,) = [json.loads(line) for line in out.splitlines()]
    assert (record["expert"], record["basis"]) == ("ann", "expert")
    assert inferloop("label", "export", "--output", "labels.jsonl")[0] == 0
    assert json.loads(Path("labels.jsonl").read_text()) == record


def test_a_session_in_the_terminal(
    inferloop, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 4)
    keys = iter(["u", "x", "1", "u", "2", "s", "out of my field", "3", "q"])
    monkeypatch.setattr("typer.prompt", lambda *args, **kwargs: next(keys))
    code, out, _ = inferloop("label", "next", str(run_id), "--expert", "ann")
    assert code == 0
    assert "nothing to undo yet" in out
    assert "'x' is not one of the keys" in out
    assert "Question" in out
    with sessions() as session:
        found = session.scalars(select(Label).order_by(Label.id)).all()
    assert len(found) == 2
    assert found[0].value == 0
    assert all(entry.seconds is not None for entry in found)


def test_somebody_without_a_login_name_says_who_judges(
    inferloop, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 54321")

    add_run(sessions)
    monkeypatch.setattr("getpass.getuser", nobody)
    code, _, err = inferloop("label", "next", "--json")
    assert (code, "say who judges with --expert" in err) == (1, True)
    assert inferloop("label", "next", "--json", "--expert", "")[0] == 1


def test_help_keeps_what_stands_in_brackets_and_groups_show_an_example(inferloop) -> None:
    assert "the table [gate]" in inferloop("gate", "--help")[1]
    for group in ("replay", "label", "feedback", "db"):
        assert f"Example: inferloop {group} " in inferloop(group, "--help")[1]


def test_label_list_counts_experts_and_machines_apart(inferloop, sessions: Sessions) -> None:
    run_id = add_run(sessions, classes=[CLASS] * 4)
    label(sessions, run_id, [-1, 0, 1])
    label(sessions, run_id, [1], expert="bob")
    label(sessions, run_id, [1] * 4, expert="machine:ref", kind="machine")
    code, out, _ = inferloop("label", "list")
    assert code == 0
    assert "4 diffs to judge, 3 judged, 4 labelled by machine" in out
    assert "disputed diffs: " in out


def test_publish_show_disable(inferloop, sessions: Sessions, tmp_path: Path) -> None:
    code, out, _ = inferloop("feedback", "show")
    assert (code, "no policy in" in out) == (0, True)
    run_id = add_run(sessions, classes=["beta/chat/-"] * 20 + [CLASS] * 20)
    label(sessions, run_id, [-1] * 20 + [0] * 20)
    code, out, err = inferloop("feedback", "publish", "--dry-run", "--days", "0.5")
    assert (code, err) == (0, "")
    assert "dry run until" in out
    assert inferloop("feedback", "publish")[0] == 0
    policy = Policy.from_json((tmp_path / "policy" / "policy.json").read_text())
    assert policy.planned("beta/chat/-") < 0
    code, out, _ = inferloop("feedback", "show")
    assert "in force until" in out
    assert "beta/chat" in out
    assert inferloop("feedback", "disable")[0] == 0
    code, _, err = inferloop("feedback", "publish")
    assert (code, "--enable" in err) == (1, True)
    assert "disabled" in inferloop("feedback", "show")[1]
    assert inferloop("feedback", "publish", "--enable")[0] == 0
    (tmp_path / "policy" / "policy.json").write_text("{")
    code, _, err = inferloop("feedback", "show")
    assert (code, "cannot be used" in err) == (1, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--basis", "robot"), "use expert or machine"),
        (("--max-effect", "0"), "max_effect is 0"),
        (("--confidence", "95"), "confidence is 95"),
        (("--basis", "machine"), "no machine verdicts"),
        (("--days", "nan"), "--days is nan"),
        (("--days", "inf"), "at most 366"),
        (("--days", "-1"), "--days is -1"),
    ],
)
def test_wrong_feedback_flags_are_one_line(
    inferloop, sessions: Sessions, flags, message: str
) -> None:
    add_run(sessions)
    code, _, err = inferloop("feedback", "publish", *flags)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1
