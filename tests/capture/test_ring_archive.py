"""What becomes of the ring of a crashed engine."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from capture.collecting import ring_archive
from capture.collecting.ring_archive import archive_ring, retire_ring
from capture.rings.attendance import readers_directory
from capture.rings.ring_files import opened_ring
from tests.capture.rings import MIB, engine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here: needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def dead_ring(directory: Path) -> Path:
    ring = engine(directory, requests=2, steps=5, capacity=MIB)
    copy = directory / f"{uuid4()}.ring"
    copy.write_bytes(ring.path.read_bytes())
    ring.close()
    ring.path.unlink()
    return copy


def test_an_archived_ring_is_read_like_the_ring(tmp_path: Path) -> None:
    path = dead_ring(tmp_path / "rings")
    readers_directory(path).mkdir()
    (readers_directory(path) / "1-top.json").write_text("{}")
    retire_ring(path, tmp_path / "crashes", keep=True)
    assert list((tmp_path / "rings").iterdir()) == []
    (archive,) = (tmp_path / "crashes").iterdir()
    assert archive.name == f"{path.stem}.ring.zst"
    assert archive.stat().st_size < MIB / 10
    with opened_ring(archive) as reader:
        assert reader.written == (10, 10)


def test_a_ring_that_its_engine_closed_is_not_kept(tmp_path: Path) -> None:
    path = dead_ring(tmp_path / "rings")
    retire_ring(path, tmp_path / "crashes", keep=False)
    assert not path.exists()
    assert not (tmp_path / "crashes").exists()


def test_the_newest_archives_are_kept(tmp_path: Path) -> None:
    crashes = tmp_path / "crashes"
    names = []
    for age in range(ring_archive.KEPT_RINGS + 3):
        archive = archive_ring(dead_ring(tmp_path / "rings"), crashes)
        os.utime(archive, (1000 + age, 1000 + age))
        names.append(archive.name)
    archive_ring(dead_ring(tmp_path / "rings"), crashes)
    left = {path.name for path in crashes.iterdir()}
    assert len(left) == ring_archive.KEPT_RINGS
    assert set(names[-ring_archive.KEPT_RINGS + 1 :]) < left


def test_a_full_disk_keeps_no_ring_and_says_so(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = dead_ring(tmp_path / "rings")
    (small_disk / "ballast").write_bytes(bytes(3 * MIB))
    with caplog.at_level(logging.WARNING):
        retire_ring(path, small_disk / "crashes", keep=True)
    assert not path.exists(), "the next engine needs its memory"
    assert list((small_disk / "crashes").iterdir()) == []
    assert "is not kept" in caplog.text
    assert "MiB to spare" in caplog.text
