"""What somebody reads who may not use a lake's directory or its files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capture.lake import open_connection
from capture.settings import Settings
from tests.capture.children import started
from tests.capture.lakes import said
from tests.waiting import PATIENCE_S

NOBODY = 65534
READ = """
import os, sys
from capture import open_lake
from capture.errors import CaptureError
home, nobody = sys.argv[1], int(sys.argv[2])
def said(home):
    try:
        with open_lake(home) as lake:
            return str(len(lake.sql("FROM marks")))
    except CaptureError as error:
        return f"{type(error).__name__} {error}"
for known, start in ((home, "1000"), ("/nowhere", "LakeMissingError")):
    assert said(known).startswith(start)  # loads what nobody might not be able to
print("ready", flush=True)
sys.stdin.readline()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(nobody)
    os.setuid(nobody)
print(said(home))
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A lake of 1000 marks that everybody may read."""
    directory = Path(tempfile.mkdtemp(prefix="inferloop-lake-", dir="/tmp"))
    directory.chmod(0o755)
    with open_connection(Settings(home=directory), read_only=False) as lake:
        lake.execute("INSERT INTO marks SELECT uuid(), now()::TIMESTAMP, '' FROM range(1000)")
    yield directory
    shutil.rmtree(directory)


@contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


class Other:
    """A reader who is not the lake's owner: nobody, when the tests run as root."""

    def __init__(self, home: Path) -> None:
        command = [sys.executable, "-c", READ, home, NOBODY]
        self._process = started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert said(self._process) == "ready"

    def read(self) -> str:
        """What it says of the lake now."""
        answer, _ = self._process.communicate("\n", PATIENCE_S)
        return answer.rstrip()


@pytest.fixture
def other(home: Path) -> Other:
    return Other(home)


def test_a_read_only_directory_can_be_read_while_a_collector_has_it_open(
    home: Path, other: Other
) -> None:
    late = Other(home)
    with mode(home / "lake", 0o555):
        with open_connection(Settings(home=home), read_only=False) as collector:
            collector.execute("BEGIN; SELECT count(*) FROM marks")
            assert other.read() == "1000"
        answer = late.read()
    assert answer.startswith("LakeError cannot open the lake at")
    assert "no collector has it open" in answer
    assert str(home / "lake") in answer


def test_a_catalog_that_may_not_be_read_is_named(home: Path, other: Other) -> None:
    with mode(home / "lake" / "catalog.sqlite", 0o200 if os.geteuid() else 0o600):
        answer = other.read()
    assert answer.endswith("catalog.sqlite: this user may not read it: use the collector's user")


def test_a_directory_that_may_not_be_entered_is_named(home: Path, other: Other) -> None:
    with mode(home / "lake", 0o600):
        answer = other.read()
    assert answer.startswith("LakeError cannot look for the lake at")
    assert answer.endswith("catalog.sqlite: Permission denied")


def test_files_that_may_not_be_read_are_named(home: Path, other: Other) -> None:
    with open_connection(Settings(home=home), read_only=False) as collector:
        collector.execute("BEGIN; SELECT count(*) FROM marks")
        with mode(home / "lake" / "data", 0o600):
            answer = other.read()
    assert answer.startswith("QueryError")
    assert "Permission denied" in answer
