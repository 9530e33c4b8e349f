"""Writes a sampled share of real requests to traffic files, off the hot path.

`Mirror.offer` takes a finished request and returns at once; a thread of its own redacts,
truncates and writes it. Nothing here ever stops or slows the server: what cannot be written is
skipped and counted. `offered == written + sum(skipped) + queued` always holds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from capture.errors import place_of
from capture.mirroring.redaction import redact_record
from capture.mirroring.sampling import (
    MirrorError,
    is_sampled,
    key_id,
    keyed_digest,
    load_key,
    opening_id,
    pseudonym,
)
from capture.mirroring.traffic_store import TrafficStore
from capture.mirroring.traffic_writer import FilePolicy, TrafficWriter
from capture.mirroring.truncation import approximate_bytes, truncate_record
from capture.settings import Settings
from capture.traffic import TrafficRecord

ALLOWED_HEADERS = frozenset(
    {"content-type", "user-agent", "traceparent", "x-conversation", "x-priority", "x-route"}
    | {"x-tenant"}
)
PERSONAL = (
    "messages", "prompt", "rendered_prompt", "prompt_token_ids", "output_text",
    "output_token_ids", "top", "logprobs", "margins", "headers",
)  # fmt: skip
TICK_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""A record that is being written when the time for a stop is over gets this long."""

QUEUE_BYTES = 64 << 20
"""Bound of the content waiting to be written, so that a burst of long prompts costs no memory."""

_STOP = object()
_log = logging.getLogger("inferloop.mirror")


@dataclass(frozen=True, slots=True)
class MirrorCounters:
    """What became of the offered records. `skipped` by reason: not_sampled, queue_full, closed,
    invalid, write_failed, failed, and those that `Mirror.skip` was told. `dropped` counts lines
    written without their content; `files_deleted` finished files that took too much room."""

    offered: int = 0
    written: int = 0
    queued: int = 0
    bytes: int = 0
    truncated: int = 0
    dropped: int = 0
    files_deleted: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    redactions: dict[str, int] = field(default_factory=dict)


class Mirror:
    """Samples, redacts and writes finished requests. One per process; safe to call from threads.

    `share` 0 to 1 of the conversations is kept. A request's or answer's text longer than
    `max_body_bytes` is cut and marked. Raises MirrorError on bad arguments only.
    """

    def __init__(
        self,
        directory: Path,
        *,
        share: float,
        key: bytes,
        max_body_bytes: int = 1 << 20,
        queue_size: int = 1024,
        files: FilePolicy | None = None,
    ) -> None:
        if not 0.0 <= share <= 1.0:
            raise MirrorError(f"mirror share {share} is outside 0 to 1")
        if not key:
            raise MirrorError("the mirror's key is empty: set INFERLOOP_MIRROR_KEY")
        self._share, self._key, self._key_id = share, key, key_id(key)
        self._max_body_bytes = max_body_bytes
        policy = files or FilePolicy()
        try:
            self._store = TrafficStore(directory, policy)
        except OSError as error:
            raise MirrorError(f"cannot write traffic to {directory}: {error.strerror}") from error
        self._writer = TrafficWriter(directory, policy)
        self._queue: queue.Queue[Any] = queue.Queue(queue_size)
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._redactions: Counter[str] = Counter()
        self._queued_bytes = 0
        self._closed = self._has_failed = self._cannot_write = False
        self._give_up_at = math.inf
        self._thread = threading.Thread(target=self._write_all, name="mirror", daemon=True)
        self._thread.start()

    @classmethod
    def from_settings(cls, settings: Settings, share: float) -> Mirror:
        """The mirror that the settings describe, with `share` of the conversations. Raises
        MirrorError."""
        configured = settings.mirror_key
        return cls(
            settings.traffic,
            share=share,
            key=load_key(settings.home, configured.get_secret_value() if configured else None),
            max_body_bytes=settings.mirror_body_kib << 10,
            files=FilePolicy(
                rotate_bytes=int(settings.mirror_rotate_mib * (1 << 20)),
                rotate_seconds=settings.mirror_rotate_seconds,
                fsync=settings.mirror_fsync,
                compress=settings.mirror_compress,
                max_bytes=_gib(settings.mirror_max_gib),
            ),
        )

    @property
    def counters(self) -> MirrorCounters:
        with self._lock:
            totals = self._totals
            return MirrorCounters(
                offered=totals["offered"],
                written=totals["written"],
                queued=totals["offered"] - totals["written"] - self._skipped.total(),
                bytes=totals["bytes"],
                truncated=totals["truncated"],
                dropped=totals["dropped"],
                files_deleted=self._store.deleted,
                skipped=dict(self._skipped),
                redactions=dict(self._redactions),
            )

    def keeps(self, conversation_id: str) -> bool:
        """Whether the records of this conversation are kept."""
        return is_sampled(conversation_id, self._share, self._key)

    def opening_id(self, tenant: str, messages: Iterable[dict[str, Any]]) -> str | None:
        """The id of a conversation without a name of its own, the same for all its turns."""
        return opening_id(self._key, tenant, messages)

    def offer(self, record: dict[str, Any]) -> None:
        """Hand over a finished request (the fields of TrafficRecord); never blocks, never raises.

        The record must not be changed afterwards.
        """
        with self._lock:
            self._totals["offered"] += 1
        try:
            reason = self._enqueue(record)
        except Exception:  # noqa: BLE001 - whatever is wrong with a record, serving goes on
            reason = "invalid"
        self._skip(reason)

    def skip(self, reason: str) -> None:
        """Count a request that there is no record of; `reason` is one of a few."""
        with self._lock:
            self._totals["offered"] += 1
            self._skipped[reason] += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and what the time is enough for, finish the active file and stop;
        later offers are skipped."""
        if self._closed:
            return
        self._closed = True
        self._give_up_at = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(_STOP, timeout=timeout_s + GRACE_SECONDS)
        self._thread.join(timeout_s + GRACE_SECONDS)
        if self._thread.is_alive():
            queued = self.counters.queued
            _log.error("traffic could not be written in time: the last %d records are lost", queued)
            return
        self._store.close(timeout_s)
        while not self._queue.empty():
            self._queue.get_nowait()
            self._skip("closed")

    def _skip(self, reason: str | None) -> None:
        if reason is not None:
            with self._lock:
                self._skipped[reason] += 1

    def _enqueue(self, record: dict[str, Any]) -> str | None:
        """Queue a record; returns why it was skipped, or None."""
        if self._closed:
            return "closed"
        conversation = record.get("conversation_id") or record["request_id"]
        if not self.keeps(conversation):
            return "not_sampled"
        size = approximate_bytes(record)
        with self._lock:
            if self._queued_bytes and self._queued_bytes + size > QUEUE_BYTES:
                return "queue_full"
            self._queued_bytes += size
        try:
            self._queue.put_nowait((record, size))
        except queue.Full:
            with self._lock:
                self._queued_bytes -= size
            return "queue_full"
        return None

    def _write_all(self) -> None:
        given_up = 0
        while True:
            try:
                item = self._queue.get(timeout=TICK_SECONDS)
            except queue.Empty:
                self._tick()
                continue
            if item is _STOP:
                break
            record, size = item
            in_time = time.monotonic() < self._give_up_at
            reason = self._write(record) if in_time else "closed"
            given_up += not in_time
            with self._lock:
                self._queued_bytes -= size
            self._skip(reason)
            self._tick()
        self._writer.finish()
        if given_up:
            _log.warning("stopped before %d records were written", given_up)

    def _tick(self) -> None:
        if self._writer.tick():
            self._store.tidy()

    def _write(self, record: dict[str, Any]) -> str | None:
        """Write one record; returns why it was skipped, or None."""
        try:
            clean = self._prepare(record)
            line = TrafficRecord.model_validate(clean).model_dump_json(
                by_alias=True, exclude_none=True
            )
            data = line.encode() + b"\n"
            self._writer.append(data)
        except ValidationError as error:
            _log.debug("a record is not valid traffic: %d errors", error.error_count())
            return "invalid"
        except OSError as error:
            self._tell_writing(error)
            return "write_failed"
        except Exception as error:  # noqa: BLE001 - one odd record must not end the mirror
            self._tell_once(error)
            return "failed"
        self._tell_writing(None)
        with self._lock:
            self._totals["written"] += 1
            self._totals["bytes"] += len(data)
            self._totals["truncated"] += bool(clean.get("truncated"))
            self._totals["dropped"] += clean.get("dropped") is not None
            self._redactions.update(clean.get("redactions") or {})
        return None

    def _prepare(self, record: dict[str, Any]) -> dict[str, Any]:
        """What may be written of a record. Content that cannot be redacted is dropped."""
        headers = dict(record.get("headers") or {})
        record = record | {
            "headers": {k.lower(): v for k, v in headers.items() if k.lower() in ALLOWED_HEADERS},
            "conversation_id": self._conversation(record),
        }
        if record.get("client"):
            record["client"] = pseudonym(str(record["client"]), self._key)
            record["client_key_id"] = self._key_id
        try:
            clean = redact_record(truncate_record(record, self._max_body_bytes))
        except Exception as error:  # noqa: BLE001 - fail closed, whatever went wrong
            self._tell_once(error)
            clean = {k: v for k, v in record.items() if k not in PERSONAL}
            if isinstance(record.get("sampling"), dict):
                clean["sampling"] = record["sampling"] | {"stop": []}
            clean = redact_record(clean) | {"dropped": "redaction failed"}
        for name in ("logprobs", "margins"):
            if clean.get(name):
                clean[name] = [x if x is not None and -1e30 < x < 1e30 else None
                               for x in clean[name]]  # fmt: skip
        return clean

    def _conversation(self, record: dict[str, Any]) -> str:
        """The conversation id, or its pseudonym when it holds personal data itself."""
        value = str(record.get("conversation_id") or record["request_id"])
        if redact_record({"conversation": value})["conversation"] == value:
            return value
        return keyed_digest(self._key, b"convers", value).hex()[:32]

    def _tell_writing(self, error: OSError | None) -> None:
        """Log when writing begins to fail and when it works again, not every record between."""
        if (error is not None) == self._cannot_write:
            return
        self._cannot_write = error is not None
        if error is None:
            _log.warning("traffic is written again")
        else:
            _log.warning("cannot write traffic, records are skipped until it works: %s", error)

    def _tell_once(self, error: Exception) -> None:
        """Log where something failed for the first time, without its message: that may quote what
        a person wrote."""
        if not self._has_failed:
            self._has_failed = True
            _log.error("a record could not be redacted or written: %s", place_of(error))


def _gib(size: float | None) -> int | None:
    return None if size is None else int(size * (1 << 30))
