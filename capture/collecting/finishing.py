"""The end of an engine: its crash report, its last rows, and what becomes of its ring.

None of it may keep rows from the lake: what fails here is said in the log. Not for noticing the
end: that is `capture.collecting.follower`.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from capture.collecting.crash import crash_report, write_report
from capture.collecting.ring_archive import is_archived, retire_ring
from capture.reader import RingReader

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("inferloop.collector")


class Finisher:
    """Writes crash reports and takes rings away, beside the collector: compressing takes time."""

    def __init__(self, crash_dir: Path) -> None:
        self._crash_dir = crash_dir
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ring-archive")

    def report(self, connection: duckdb.DuckDBPyConnection, reader: RingReader) -> str:
        """Write the report of a crashed engine; its path, or why there is none."""
        header = reader.header
        try:
            reader.check_size()
            report = crash_report(connection, reader)
            path = write_report(self._crash_dir, report)
        except Exception as error:  # noqa: BLE001  whatever it is, the rows go on
            why = error.strerror if isinstance(error, OSError) else error
            log.error("engine %s (pid %d) died", header.engine_id, header.pid)
            log.warning("no crash report in %s: %s", self._crash_dir, why)
            return f"no report in {self._crash_dir}: {why}"
        log.error(
            "engine %s (pid %d) died with %d requests in its open step: %s",
            header.engine_id,
            header.pid,
            len(report["open_step"]),
            path,
        )
        return str(path)

    def retire(self, reader: RingReader, *, closed: bool) -> None:
        """Take a finished ring away; one that its engine did not close is kept, compressed.

        `reader` is closed.
        """
        path, header = reader.path, reader.header
        keep = not closed and not is_archived(header.engine_id, self._crash_dir)
        reader.close()
        self._worker.submit(self._retire, path, keep)

    def close(self) -> None:
        """Wait for the rings that are being taken away."""
        self._worker.shutdown(wait=True)

    def _retire(self, path: Path, keep: bool) -> None:
        try:
            retire_ring(path, self._crash_dir, keep=keep)
        except Exception as error:  # noqa: BLE001  nobody waits for this thread's result
            log.warning("cannot remove the ring %s, remove it yourself: %s", path, error)
