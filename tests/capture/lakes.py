"""Lakes that tests read, and what gets in a collector's way: other processes with the same lake."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from capture.collector import Collector
from capture.lake import LakePlace
from tests.capture.children import started


def place_of(home: Path) -> LakePlace:
    return LakePlace(str(home / "lake" / "catalog.sqlite"), str(home / "lake" / "data"))


def commit_rings(home: Path) -> LakePlace:
    """Commit all frames of the rings in `home/rings` to the lake of `home`."""
    place, stop = place_of(home), threading.Event()
    Collector(place, ring_dir=home / "rings", crash_dir=home, stop=stop).run(once=True)
    return place


def copied(made: LakePlace, place: LakePlace) -> LakePlace:
    """A lake that nobody has open, again at another place: for tests that change it."""
    source, catalog = Path(made.catalog), Path(place.catalog)
    catalog.parent.mkdir(parents=True, exist_ok=True)
    for file in source.parent.glob(f"{source.name}*"):
        shutil.copy(file, catalog.with_name(catalog.name + file.name.removeprefix(source.name)))
    shutil.copytree(made.data, place.data)
    with closing(sqlite3.connect(catalog)) as connection:
        moved = "UPDATE ducklake_metadata SET value = ? WHERE key = 'data_path'"
        connection.execute(moved, [f"{place.data}/"])
        connection.commit()
    return place


@contextmanager
def foreign_lock(place: LakePlace) -> Iterator[None]:
    """Another process holds the catalog's write lock. (POSIX locks do not work within one.)"""
    code = (
        "import sqlite3, sys\n"
        "catalog = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)\n"
        "catalog.execute('BEGIN IMMEDIATE')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, place.catalog]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield
        process.communicate("")


def start_collector(home: Path, rings: Path) -> subprocess.Popen[str]:
    """A collector in a process of its own, at work; `said` reads what it says then."""
    command = [sys.executable, "-m", "tests.capture.collect_process", home, rings]
    process = started(command, stdout=subprocess.PIPE)
    assert said(process) == "ready"
    return process


def said(process: subprocess.Popen[str]) -> str:
    """The next line of a process, which must not have ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended with status {process.wait()}"
    return line.rstrip()
