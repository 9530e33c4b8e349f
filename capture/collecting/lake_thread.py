"""The thread that works on the lake, so that rings are read while a commit or a merge goes on.

One piece of work at a time, in the order given: whoever holds `LakeThread` may touch what the work
touches once it is `settled`. Not for what is done: that is `capture.collector`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class LakeThread:
    """What a piece of work raises, the next call of any method but `close` raises."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lake")
        self._working: Future[object] | None = None

    @property
    def busy(self) -> bool:
        """Whether a piece of work is not done, or nobody has asked yet how it ended."""
        return self._working is not None

    @property
    def done(self) -> bool:
        """Whether `settle` would not wait."""
        return self._working is None or self._working.done()

    def begin(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let `work` be done, after what is being done has been waited for."""
        self.settle()
        self._working = self._thread.submit(work, *args, **kwargs)

    def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have `work` done and wait for its result."""
        self.settle()
        return self._thread.submit(work, *args, **kwargs).result()

    def settle(self) -> None:
        """Wait for the end of what is being done."""
        working, self._working = self._working, None
        if working is not None:
            working.result()

    def close(self) -> None:
        """Wait for the end, whatever it is."""
        self._thread.shutdown(wait=True)
