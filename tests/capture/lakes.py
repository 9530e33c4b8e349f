"""Lakes that tests read: what the rings below a directory hold, committed."""

from __future__ import annotations

import threading
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
