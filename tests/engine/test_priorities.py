"""The feedback policy: what it adjusts, what it refuses, and how a running engine follows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engine.priorities import (
    ClassAdjustment,
    Policy,
    PolicyChange,
    PolicyError,
    PolicyFile,
    write_policy,
)
from tests.waiting import PATIENCE_S

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ENTRY = {"adjustment": -1, "labels": 30, "score": 0.4, "upper": 0.45, "basis": "expert"}


def make(**changes: object) -> Policy:
    fields: dict[str, object] = {
        "policy_id": "p1",
        "created_at": NOW,
        "expires_at": NOW + timedelta(days=7),
        "direction": "demote_harmed",
        "enabled": True,
        "dry_run": False,
        "max_effect": 20,
        "old_build": "a" * 16,
        "new_build": "b" * 16,
        "classes": {
            "acme": ClassAdjustment(-5, 30, 0.45, 0.49, "expert"),
            "acme/chat": ClassAdjustment(-40, 30, 0.3, 0.4, "expert"),
            "acme/chat/0badcafe": ClassAdjustment(-7, 30, 0.4, 0.48, "machine"),
        },
    }
    return Policy(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("class_key", "expected"),
    [
        ("acme/chat/0badcafe", -7),
        ("acme/chat/ffffffff", -20),
        ("acme/batch/-", -5),
        ("acmeco/chat/-", 0),
        ("other/chat/-", 0),
    ],
)
def test_most_specific_class_wins_and_effect_is_clamped(class_key: str, expected: int) -> None:
    assert make().adjustment(class_key, NOW) == expected


@pytest.mark.parametrize(
    "changes", [{"enabled": False}, {"dry_run": True}, {"expires_at": NOW}, {"max_effect": 0}]
)
def test_policy_not_in_force_adjusts_nothing(changes: dict[str, object]) -> None:
    assert make(**changes).adjustment("acme/chat/0badcafe", NOW) == 0


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "policy" / "policy.json"
    write_policy(path, make())
    assert Policy.from_json(path.read_text()) == make()
    assert [p.name for p in path.parent.iterdir()] == ["policy.json"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", "inferloop.policy/2"),
        ("max_effect", 101),
        ("max_effect", True),
        ("enabled", "yes"),
        ("expires_at", "tomorrow"),
        ("expires_at", "2026-12-01T00:00:00"),
        ("direction", "promote"),
        (
            "classes",
            {"a": {"adjustment": 1.5, "labels": 1, "score": 0, "upper": 0, "basis": "expert"}},
        ),
        (
            "classes",
            {"a": {"adjustment": 1, "labels": 1, "score": 0, "upper": 2, "basis": "expert"}},
        ),
        (
            "classes",
            {"a": {"adjustment": 1, "labels": 1, "score": 10**400, "upper": 0, "basis": "expert"}},
        ),
        ("policy_id", "half a \ud800 pair"),
        ("policy_id", "x" * 129),
        ("surprise", 1),
    ],
)
def test_invalid_field_is_named(field: str, value: object) -> None:
    raw = {**json.loads(make().to_json()), field: value}
    with pytest.raises(PolicyError, match=field):
        Policy.from_json(json.dumps(raw))


def test_missing_field_is_named() -> None:
    raw = json.loads(make().to_json())
    del raw["dry_run"]
    with pytest.raises(PolicyError, match="dry_run is missing"):
        Policy.from_json(json.dumps(raw))


def test_file_is_followed_and_faults_mean_neutral_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    file = PolicyFile(path)
    assert file.poll(NOW) is None

    write_policy(path, make())
    change = file.poll(NOW)
    assert change is not None
    assert change.policy_id == "p1"
    assert file.poll(NOW) is None

    path.write_text("{broken")
    change = file.poll(NOW)
    assert change is not None
    assert change.policy is None
    assert "not JSON" in change.reason
    assert file.current is None
    assert file.poll(NOW) is None

    write_policy(path, make(policy_id="p2"))
    assert file.poll(NOW).policy_id == "p2"  # type: ignore[union-attr]
    expired = file.poll(NOW + timedelta(days=8))
    assert expired is not None
    assert "expired" in expired.reason
    assert file.poll(NOW + timedelta(days=8)) is None

    path.unlink()
    assert "gone" in file.poll(NOW).reason  # type: ignore[union-attr]


def test_pipe_in_place_of_the_file_does_not_block_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    os.mkfifo(path)
    changes: list[PolicyChange | None] = []
    poller = threading.Thread(target=lambda: changes.append(PolicyFile(path).poll(NOW)))
    poller.daemon = True
    poller.start()
    poller.join(PATIENCE_S)
    assert not poller.is_alive()
    assert changes[0] is not None
    assert "not a regular file" in changes[0].reason


def test_failed_write_leaves_the_old_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.json"
    write_policy(path, make())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_policy(path, make(policy_id="p2"))
    assert Policy.from_json(path.read_text()).policy_id == "p1"
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]


def test_the_policy_types_import_no_torch() -> None:
    code = (
        "import sys, engine.priorities; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
