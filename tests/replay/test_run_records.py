"""What a run says of itself later: who took part, and why it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

import cli.replay  # noqa: F401 - adds its commands
from cli.main import run as run_command
from replay.builds import BuildSpec
from replay.models import Build, Run
from replay.run import Bounds, replay
from tests.replay.conftest import prompts, toy, traffic

Sessions = sessionmaker[Session]
Toys = Callable[[str], BuildSpec]


def make_run(
    sessions: Sessions, tmp_path: Path, old: BuildSpec, new: BuildSpec, count: int = 2
) -> Run:
    path = traffic(tmp_path / "t.jsonl", prompts(count))
    bounds = Bounds(lateness_p99_ms=60_000)
    return replay(
        sessions, old=old, new=new, traffic=path, out_dir=tmp_path / "runs", bounds=bounds
    )


def test_a_run_calls_its_builds_as_its_own_files_do(
    sessions: Sessions, tmp_path: Path, toys: Toys
) -> None:
    """Yesterday's candidate is today's baseline, with the same fingerprint."""
    plain, flip = toys("plain"), toys("flip")
    names = {"main": plain, "candidate": flip, "baseline": flip, "next": toys("finish")}
    specs = {name: spec.model_copy(update={"name": name}) for name, spec in names.items()}
    make_run(sessions, tmp_path, specs["main"], specs["candidate"])
    make_run(sessions, tmp_path, specs["baseline"], specs["next"])
    with sessions() as session:
        found = session.scalars(select(Run).order_by(Run.id)).all()
        assert [(run.name_of("old"), run.name_of("new")) for run in found] == [
            ("main", "candidate"),
            ("baseline", "next"),
        ]
        assert found[0].new_build_id == found[1].old_build_id
        assert session.scalar(select(func.count()).select_from(Build)) == 3


def test_a_run_without_names_of_its_own_has_those_of_its_builds() -> None:
    run = Run(old_build=Build(name="a"), new_build=Build(name="b"), summary={})
    assert (run.name_of("old"), run.name_of("new")) == ("a", "b")


def test_the_reason_of_a_crashed_build_is_one_line_with_its_log(
    sessions: Sessions, tmp_path: Path, toys: Toys
) -> None:
    reason = str(make_run(sessions, tmp_path, toys("plain"), toy("crash"), count=12).reason)
    assert reason.count("\n") == 0
    assert "ended with exit code 7; see /" in reason
    assert reason.endswith("new.log")


def test_ctrl_c_says_what_becomes_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> Run:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFERLOOP_HOME", str(tmp_path))
    monkeypatch.setattr("replay.run.replay", interrupted)
    (tmp_path / "b.toml").write_text("[build]\nendpoint = 'http://127.0.0.1:1'\n")
    arguments = ["inferloop", "replay", "--old", "b.toml", "--new", "b.toml"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        run_command()
    assert ended.value.code == 130
    assert "a run that had begun is aborted" in capsys.readouterr().err
