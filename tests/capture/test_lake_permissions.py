"""What somebody reads who may not use a lake's directory or its files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capture import open_lake
from capture.errors import CaptureError
from capture.lake import open_connection
from capture.settings import Settings

NOBODY = 65534


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A lake of 1000 marks that everybody may read."""
    directory = Path(tempfile.mkdtemp(prefix="inferloop-lake-", dir="/tmp"))
    directory.chmod(0o755)
    with open_connection(Settings(home=directory), read_only=False) as lake:
        lake.execute("INSERT INTO marks SELECT uuid(), now()::TIMESTAMP, '' FROM range(1000)")
    assert said_by_reader(directory) == "1000"  # loads what nobody may not be able to import
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


def read_as_other(home: Path) -> str:
    """What a reader says who is not the lake's owner: nobody, when the tests run as root."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(writing, said_by_reader(home).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


def said_by_reader(home: Path) -> str:
    try:
        with open_lake(home) as lake:
            return str(len(lake.sql("FROM marks")))
    except CaptureError as error:
        return f"{type(error).__name__} {error}"


def test_a_read_only_directory_can_be_read_while_a_collector_has_it_open(home: Path) -> None:
    with mode(home / "lake", 0o555):
        with open_connection(Settings(home=home), read_only=False) as collector:
            collector.execute("BEGIN; SELECT count(*) FROM marks")
            assert read_as_other(home) == "1000"
        said = read_as_other(home)
    assert said.startswith("LakeError cannot open the lake at")
    assert "no collector has it open" in said
    assert str(home / "lake") in said


def test_a_catalog_that_may_not_be_read_is_named(home: Path) -> None:
    with mode(home / "lake" / "catalog.sqlite", 0o200 if os.geteuid() else 0o600):
        said = read_as_other(home)
    assert said.endswith("catalog.sqlite: this user may not read it: use the collector's user")


def test_a_directory_that_may_not_be_entered_is_named(home: Path) -> None:
    with mode(home / "lake", 0o600):
        said = read_as_other(home)
    assert said.startswith("LakeError cannot look for the lake at")
    assert said.endswith("catalog.sqlite: Permission denied")


def test_files_that_may_not_be_read_are_named(home: Path) -> None:
    with open_connection(Settings(home=home), read_only=False) as collector:
        collector.execute("BEGIN; SELECT count(*) FROM marks")
        with mode(home / "lake" / "data", 0o600):
            said = read_as_other(home)
    assert said.startswith("QueryError")
    assert "Permission denied" in said
