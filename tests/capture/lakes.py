"""Lakes that tests read: what the rings of a directory hold, committed without a collector."""

from __future__ import annotations

from pathlib import Path

from capture.ingest import RingRows
from capture.lake import LakePlace, open_lake
from capture.reader import RingReader, discover


def place_of(home: Path) -> LakePlace:
    return LakePlace(str(home / "lake" / "catalog.sqlite"), str(home / "lake" / "data"))


def commit_rings(home: Path) -> LakePlace:
    """Commit all frames of the rings in `home/rings` to the lake of `home`, and remove them."""
    place = place_of(home)
    lake = open_lake(place, read_only=False)
    try:
        for path in discover(home / "rings"):
            reader = RingReader(path)
            rows = RingRows(reader.header)
            while len(batch := reader.read()):
                rows.add(batch)
            reader.close()
            path.unlink()
            lake.execute("BEGIN")
            rows.insert(lake)
            lake.execute("COMMIT")
    finally:
        lake.close()
    return place
