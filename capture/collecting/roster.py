"""Which rings of a directory are followed, and in which order they are read.

Living engines overwrite what is not read in time, so they are all followed and come first; rings
of engines that are gone can wait, a few are open at a time. Not for reading: `follower`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from capture.collecting.follower import Follower
from capture.errors import RingError, RingFormatError, RingIncompleteError
from capture.reader import RingReader, check_directory, discover

log = logging.getLogger("inferloop.collector")

OPEN_STALE_RINGS = 8
PRESSED_SHARE = 0.5  # of a living engine's ring unread: the stale ones wait

Follow = Callable[[RingReader], Follower | None]


class Roster:
    """The followers of a directory's rings and the stale rings that wait for their turn."""

    def __init__(self, directory: Path) -> None:
        """Raises RingError when there is such a directory and it cannot be listed."""
        check_directory(directory)
        self._directory = directory
        self._directory_problem: str | None = None
        self._followers: dict[Path, Follower] = {}
        self._stale: deque[Path] = deque()
        self._waiting: set[Path] = set()
        self._refused: set[Path] = set()
        self._unreadable: set[Path] = set()

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def followers(self) -> list[Follower]:
        return list(self._followers.values())

    @property
    def living(self) -> list[Follower]:
        return [follower for follower in self._followers.values() if not follower.abandoned]

    @property
    def stale_left(self) -> int:
        """Rings of engines that are gone and whose rows are not all in the lake."""
        return len(self._stale) + len(self._followers) - len(self.living)

    @property
    def pressed(self) -> bool:
        """Whether a living engine is about to overwrite what was not read."""
        return max((f.lag_share for f in self.living), default=0.0) > PRESSED_SHARE

    def discover(self, follow: Follow) -> None:
        """Take in the rings that are new.

        `follow` makes a reader's follower, or None for a ring that needs none; what it raises goes
        through, RingError alone refuses the ring for good. A ring that cannot be opened, for lack
        of permission or of open files, is tried again at each call.
        """
        if not self._can_list():
            return
        found = discover(self._directory)
        self._refused.intersection_update(found)
        self._unreadable.intersection_update(found)
        for path in found:
            if path not in self._followers and path not in self._refused | self._waiting:
                self._take(path, follow)
        while self._stale and self._open_stale < OPEN_STALE_RINGS:
            path = self._stale.popleft()
            self._waiting.discard(path)
            self._open(path, follow)

    def next_stale(self) -> Follower | None:
        """The stale ring whose turn it is; they take turns."""
        for path, follower in self._followers.items():
            if follower.abandoned and not follower.drained:
                self._followers[path] = self._followers.pop(path)
                return follower
        return None

    def drop(self, follower: Follower) -> None:
        """Follow a ring no longer, nor ever again under this name."""
        path = follower.reader.path
        self._followers.pop(path, None)
        self._refused.add(path)

    def close(self) -> None:
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()

    @property
    def _open_stale(self) -> int:
        return len(self._followers) - len(self.living)

    def _can_list(self) -> bool:
        """Whether new rings would be seen; says so when that changes. Those that are followed need
        no directory."""
        try:
            check_directory(self._directory)
        except RingError as error:
            if self._directory_problem is None:
                log.warning("new engines are not followed: %s", error)
            self._directory_problem = str(error)
            return False
        if self._directory_problem is not None:
            self._directory_problem = None
            log.warning("new engines are followed again: %s can be listed", self._directory)
        return True

    def _take(self, path: Path, follow: Follow) -> None:
        """Follow a living engine's ring at once, let any other wait."""
        try:
            reader = RingReader(path)
        except RingIncompleteError:
            return
        except RingError as error:
            self._cannot_open(path, error)
            return
        if not reader.writer_alive():
            reader.close()
            self._stale.append(path)
            self._waiting.add(path)
        else:
            self._follow(reader, follow)

    def _open(self, path: Path, follow: Follow) -> None:
        try:
            reader = RingReader(path)
        except RingError as error:
            if path.exists():
                self._cannot_open(path, error)
            return
        self._follow(reader, follow)

    def _follow(self, reader: RingReader, follow: Follow) -> None:
        try:
            follower = follow(reader)
        except RingError as error:
            reader.close()
            self._refuse(reader.path, error)
            return
        except BaseException:
            reader.close()
            raise
        if follower is not None:
            self._followers[reader.path] = follower
        else:
            self._refused.add(reader.path)

    def _cannot_open(self, path: Path, error: RingError) -> None:
        if isinstance(error, RingFormatError):
            self._refuse(path, error)
        elif path not in self._unreadable:
            self._unreadable.add(path)
            log.warning("not yet followed: %s", error)

    def _refuse(self, path: Path, error: RingError) -> None:
        self._refused.add(path)
        log.warning("ignored: %s", error)
