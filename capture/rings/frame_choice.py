"""Which of a ring's frames people want to see: the last ones that say what the engine did.

An idle engine writes little but samples of its memory, which would hide the rest.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from capture.frames import FrameType
from capture.reader import FrameBatch
from capture.ring import RingHeader
from capture.rings.frame_text import FrameLine, frame_line

SAMPLES = (FrameType.GPU, FrameType.MEMORY)
"""Kinds that come by the clock, whether the engine does anything or not."""


class FrameChoice:
    """The newest `last` frames that are no samples, and the newest frame of each kind, samples too;
    with `raw` the newest `last` frames, whatever they are. `last` 0: none."""

    def __init__(self, last: int, *, raw: bool = False) -> None:
        self._last, self._raw = last, raw
        self._frames: deque[tuple[FrameBatch, int]] = deque(maxlen=last)
        self._newest: dict[int, tuple[FrameBatch, int]] = {}

    def add(self, batch: FrameBatch) -> None:
        """Look at the next frames."""
        if not self._last:
            return
        kinds = batch.headers["type"]
        meant = np.ones(len(kinds), bool) if self._raw else ~np.isin(kinds, SAMPLES)
        self._frames.extend((batch, index) for index in np.flatnonzero(meant)[-self._last :])
        if not self._raw:
            for kind in np.unique(kinds).tolist():
                self._newest[kind] = (batch, np.flatnonzero(kinds == kind)[-1])

    def lines(self, header: RingHeader) -> list[FrameLine]:
        """What was chosen, in the order of the ring."""
        found = [*self._frames, *self._newest.values()]
        lines = [frame_line(header, batch, int(index)) for batch, index in found]
        unique = {line.sequence: line for line in lines}
        return [unique[sequence] for sequence in sorted(unique)]
