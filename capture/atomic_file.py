"""Output files that are there whole or not at all. Not for the ring, the lake or the mirror."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from capture.errors import CaptureError


class OutputError(CaptureError):
    """A result cannot be written where it should go."""


@contextmanager
def opened(output: Path) -> Iterator[IO[bytes]]:
    """A binary file to write; it takes its name once it is complete. Raises OutputError.

    A device or pipe is written to as it is, a link goes on pointing where it does.
    """
    try:
        if output.exists() and not output.is_file():
            with output.open("wb") as file:
                yield file
            return
        output = output.resolve()
        temporary = output.with_name(f".{output.name}.{os.getpid()}.part")
        try:
            with temporary.open("wb") as file:
                yield file
            temporary.replace(output)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
