"""docs/judging.md shows commands and settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cli.feedback
import cli.label
from evaluation.gate_policy import GatePolicy

PAGE = (Path(__file__).parents[2] / "docs" / "judging.md").read_text(encoding="utf-8")


def test_the_policy_shown_is_the_default_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "gate.toml"
    path.write_text(text)
    assert GatePolicy.load(path) == GatePolicy()
    assert set(re.findall(r"^(\w+) =", text, re.MULTILINE)) == set(GatePolicy.model_fields)


@pytest.mark.parametrize(
    ("group", "app"),
    [("label", cli.label.label_app), ("feedback", cli.feedback.feedback_app)],
)
def test_the_commands_shown_exist(group: str, app) -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    shown = set(re.findall(rf"inferloop {group} (\w+)", PAGE))
    assert shown
    assert shown <= known
