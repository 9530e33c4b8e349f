"""Settings come from the environment, then the file, and say clearly what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture.errors import SettingsError
from capture.mirroring.sampling import MirrorError, load_key
from capture.settings import Settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFERLOOP_HOME", raising=False)


def test_environment_wins_over_file_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("inferloop.toml").write_text('mirror_share = 0.5\nring_mib = 7\nhome = "there"\n')
    monkeypatch.setenv("INFERLOOP_RING_MIB", "9")
    settings = Settings()
    assert (settings.mirror_share, settings.ring_mib) == (0.5, 9)
    assert settings.traffic == Path("there/traffic")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mirror_share = 2\n", "mirror_share .*INFERLOOP_MIRROR_SHARE.* 2"),
        ('ring_mib = "much"\n', "ring_mib"),
        ("colour = 1\n", "no setting colour"),
        ("not toml", "inferloop.toml"),
        ('mirror_key = "secret"\n', "INFERLOOP_MIRROR_KEY"),
    ],
)
def test_a_bad_file_is_named(text: str, told: str) -> None:
    Path("inferloop.toml").write_text(text)
    with pytest.raises(SettingsError, match=told) as raised:
        Settings()
    assert "secret" not in str(raised.value)


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERLOOP_RING_MIB", "0")
    with pytest.raises(SettingsError, match="INFERLOOP_RING_MIB"):
        Settings()


def test_the_mirrors_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = load_key(tmp_path, None)
    assert len(key) == 32
    assert load_key(tmp_path, None) == key
    assert (tmp_path / "mirror.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["mirror.key"]


@pytest.mark.parametrize("content", ["", "no hex", "é"])
def test_a_damaged_key_is_named_and_never_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "mirror.key").write_text(content)
    with pytest.raises(MirrorError, match=r"mirror\.key"):
        load_key(tmp_path, None)
    assert (tmp_path / "mirror.key").read_text() == content
