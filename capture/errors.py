"""What can go wrong on the trace path, as the user should read it.

Every message names the value, the limit and the way out. `exit_code` tells the command line that
the error is for the user and not a defect.
"""

from __future__ import annotations

import re

LONGEST_MESSAGE = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PASSWORDS = (
    re.compile(r"""(://[^:/?@\s"]*:)[^\s"]*(?=@)"""),
    re.compile(r"""(?i)(\bpassword=)[^&\s"]*"""),
)


class CaptureError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class SettingsError(CaptureError):
    """A setting is not valid; the message names it."""


class RingError(CaptureError):
    """A ring cannot be created, written or read."""


class RingInUseError(RingError):
    """The ring's file exists already, with a living writer or without."""


class RingSpaceError(RingError):
    """The file system has no room for the ring."""


class RingFormatError(RingError):
    """The file is no ring, or one that this version cannot read."""


class RingIncompleteError(RingFormatError):
    """The file is shorter than a ring, perhaps because it is still being copied: try again later.

    A file that stays like this was cut.
    """


class FrameTooLargeError(RingError):
    """A frame is longer than the ring takes."""


class FrameError(CaptureError):
    """A frame's payload does not have the shape its header promises."""


class LakeError(CaptureError):
    """The trace lake cannot be opened, read or written."""


class LakeMissingError(LakeError):
    """There is no lake at this place yet."""


class LakeVersionError(LakeError):
    """The lake's schema is newer or older than this version reads."""


class CollectorError(CaptureError):
    """The collector cannot start or go on."""


class QueryError(CaptureError):
    """A user's query was refused, failed or ran out of its limits.

    `place`: line and column of the query, from 1, where DuckDB says where it is wrong.
    """

    def __init__(self, message: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.place = place


def first_line(error: Exception) -> str:
    """What a DuckDB error says, without class, stack and query; of a failed commit the cause.

    Cut when it is long and without control characters: it may quote what a person wrote, and the
    URL of a catalog, which it shows without the password.
    """
    text = str(error).strip()
    lines = [line for line in text.split("\n") if not line.startswith("DETAIL:")] or [text]
    line = lines[-1] if "Failed to commit" in lines[0] else lines[0]
    line = without_passwords(_CONTROL.sub(" ", line.partition("Error: ")[2] or line))
    if len(line) > LONGEST_MESSAGE:
        line = f"{line[:LONGEST_MESSAGE]}..."
    return f"{line} (is the disk full?)" if line.endswith("disk I/O error") else line


def without_passwords(text: str) -> str:
    """`text` with `***` for the passwords of the URLs in it, before the host or as parameters."""
    for pattern in _PASSWORDS:
        text = pattern.sub(r"\1***", text)
    return text


def place_of(error: BaseException) -> str:
    """Kind and place of an error without its message, which may quote what a person wrote."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error).__name__
    code = trace.tb_frame.f_code
    return f"{type(error).__name__} in {code.co_qualname}, {code.co_filename}:{trace.tb_lineno}"
