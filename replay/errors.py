"""What can go wrong in a replay, as the user should read it."""

from __future__ import annotations


class ReplayError(Exception):
    """Base of all errors of this package. Lines of a log may follow the message after a colon."""

    exit_code = 1

    @property
    def one_line(self) -> str:
        """The message without the lines of a log."""
        return str(self).partition(":\n")[0]


class TrafficError(ReplayError):
    """A traffic file is missing or holds nothing that can be replayed."""


class BuildError(ReplayError):
    """A build is described wrongly, does not start, or does not answer."""


class RunError(ReplayError):
    """A replay run cannot be made, or there is none with this number."""


class DatabaseError(ReplayError):
    """The relational database cannot be read or written: locked, full, damaged, unreachable."""
