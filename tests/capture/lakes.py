"""Lakes that tests read: what the rings below a directory hold, committed."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from capture.collector import Collector
from capture.lake import LakePlace


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
