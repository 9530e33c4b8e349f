"""Reading traffic files as bytes, line by line: finished, compressed, or still being written.

Not for what a line means: that is `capture.traffic`; not for writing them: `capture.mirror`.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from capture.errors import CaptureError

SUFFIXES = (".jsonl.part", ".jsonl", ".jsonl.zst")
"""The names a traffic file has one after the other: being written, finished, compressed."""

READ_BYTES = 1 << 16

LONGEST_LINE = 256 << 20
"""A mirror's longest line is a few MiB. What is longer is cut here: it is no record, and would take
all the memory."""


class TrafficFileError(CaptureError):
    """A traffic file is not there or cannot be read."""


def traffic_files(path: Path) -> list[Path]:
    """The file itself, or the traffic files of a directory in the order of their names.

    A file that is there under two names, because it was being compressed when its writer was
    killed, is given once. Raises TrafficFileError when there is none.
    """
    if path.is_dir():
        found = _listed(path)
        if not found:
            raise TrafficFileError(
                f"{path} holds no traffic (*.jsonl, .part and .zst too): serve with "
                "`--mirror-share 1` first"
            )
        return found
    if not path.exists():
        raise TrafficFileError(
            f"there is no traffic at {path}: name a traffic file or a directory of them, or serve "
            "with `--mirror-share 1` first"
        )
    return [path]


def _listed(directory: Path) -> list[Path]:
    """Listed twice: a file that is renamed during one listing may be missing from that one."""
    latest: dict[str, int] = {}
    for file in [*directory.iterdir(), *directory.iterdir()]:
        base, dot, suffix = file.name.rpartition(".jsonl")
        if dot and dot + suffix in SUFFIXES and not file.is_dir():
            latest[base] = max(latest.get(base, 0), SUFFIXES.index(dot + suffix))
    return [directory / f"{base}{SUFFIXES[rank]}" for base, rank in sorted(latest.items())]


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes, line end included, of every line; without a byte order mark.

    Of a line longer than LONGEST_LINE its beginning. Raises TrafficFileError.
    """
    import zstandard

    try:
        with _open(path) as file:
            for number, line in enumerate(_lines(file), start=1):
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except OSError as error:
        raise TrafficFileError(f"cannot read {path}: {error.strerror or error}") from error
    except zstandard.ZstdError as error:
        raise TrafficFileError(f"cannot decompress {path}: {error}") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE):
        yield line
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE)


def _open(path: Path) -> BinaryIO:
    """The file's lines, also when the mirror has finished (renamed) it since it was listed."""
    for candidate in (path, *_later_names(path)):
        try:
            file = candidate.open("rb")
        except FileNotFoundError:
            continue
        return _decompressed(file) if candidate.suffix == ".zst" else file
    raise FileNotFoundError(2, "No such file or directory")


def _later_names(path: Path) -> list[Path]:
    if path.suffix == ".part":
        finished = path.with_suffix("")
        return [finished, finished.with_name(f"{finished.name}.zst")]
    return [path.with_name(f"{path.name}.zst")] if path.suffix == ".jsonl" else []


def _decompressed(file: BinaryIO) -> BinaryIO:
    return cast("BinaryIO", io.BufferedReader(_Frames(file), 1 << 20))


class _Frames(io.RawIOBase):
    """The content of zstd frames one after the other. Unlike the library's own reader it raises
    ZstdError where the last one has no end: a file that was cut off must not pass for a short one.
    """

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._packed:
                self._packed = self._file.read(READ_BYTES)
            if not self._packed:
                return self._end()
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _end(self) -> int:
        import zstandard

        if self._frame is not None:
            raise zstandard.ZstdError("its end is missing: the file was cut off")
        return 0
