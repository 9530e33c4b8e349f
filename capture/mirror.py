"""Writes a sampled share of real requests to traffic files, off the hot path.

`Mirror.offer` takes a finished request and returns at once; a thread of its own redacts,
truncates and writes it. Nothing here ever stops or slows the server: what cannot be written is
skipped and counted. `offered == written + sum(skipped) + queued` always holds.

Files: `traffic-<UTC start>-<pid>.jsonl.part` is being written (the writer holds a lock on it)
and becomes `.jsonl` by an atomic rename when it is large or old enough, and on `close`. Readers
take both. Each line is one `write`, so killing the process loses the lines still queued and
leaves at most one broken last line. Data is synced to the disk once a second and before a
rename: a power cut loses what was written in the last second.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import logging
import os
import queue
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from capture.errors import CaptureError
from capture.redaction import redact_record
from capture.traffic import TrafficRecord
from capture.truncation import approximate_bytes, truncate_record

ALLOWED_HEADERS = frozenset(
    {"content-type", "user-agent", "traceparent", "x-conversation", "x-priority", "x-route"}
    | {"x-tenant"}
)
PERSONAL = (
    "messages", "prompt", "rendered_prompt", "prompt_token_ids", "output_text",
    "output_token_ids", "top", "logprobs", "margins", "headers",
)  # fmt: skip
SYNC_SECONDS = 1.0
QUEUE_BYTES = 64 << 20
"""Bound of the content waiting to be written, so that a burst of long prompts costs no memory."""

_STOP = object()
_log = logging.getLogger("inferloop.mirror")


class MirrorError(CaptureError):
    """The mirror cannot start: bad share, key or directory."""


@dataclass(frozen=True, slots=True)
class MirrorCounters:
    """What became of the offered records. `skipped` by reason: not_sampled, queue_full, closed,
    invalid, write_failed, failed. `dropped` counts lines written without their content."""

    offered: int = 0
    written: int = 0
    queued: int = 0
    bytes: int = 0
    truncated: int = 0
    dropped: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    redactions: dict[str, int] = field(default_factory=dict)


def load_key(home: Path, configured: str | None) -> bytes:
    """The key of sampling and pseudonyms: `configured` (INFERLOOP_MIRROR_KEY), else a random one
    that is made once and kept in `home`/mirror.key, readable by its owner only."""
    if configured:
        return configured.encode()
    path = home / "mirror.key"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make_key(path)
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError:
        key = b""
    except OSError as error:
        raise MirrorError(f"cannot keep the mirror's key in {path}: {error.strerror}") from error
    if not key:
        raise MirrorError(
            f"{path} holds no key (hex digits): restore it, or remove it for a new one, under "
            "which other conversations are sampled and clients get other pseudonyms"
        )
    return key


def _make_key(path: Path) -> None:
    """Write a random key, whole or not at all; another process's that came first is kept."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_bytes(32).hex() + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def keyed_digest(key: bytes, purpose: bytes, value: str) -> bytes:
    """32 bytes of BLAKE2s under a key of any length; purposes (8 bytes at most) never collide."""
    secret = hashlib.blake2s(key).digest()
    data = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2s(data, key=secret, person=purpose).digest()


def is_sampled(conversation_id: str, share: float, key: bytes) -> bool:
    """Whether a conversation is mirrored: the same answer for all its requests, at any time."""
    draw = int.from_bytes(keyed_digest(key, b"sample", conversation_id)[:7], "big")
    return draw < share * (1 << 56)


def pseudonym(address: str, key: bytes) -> str:
    """A client address as 16 hex digits that cannot be computed or reversed without the key."""
    try:
        parsed = ipaddress.ip_address(address)
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        address = str(mapped or parsed)
    except ValueError:
        pass  # a host name or a proxy's own notation: hashed as it is
    return keyed_digest(key, b"client", address).hex()[:16]


def key_id(key: bytes) -> str:
    """Names the key of a pseudonym without revealing it: 8 hex digits."""
    return keyed_digest(key, b"key-id", "").hex()[:8]


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
        rotate_bytes: int = 64 << 20,
        rotate_seconds: float = 3600.0,
    ) -> None:
        if not 0.0 <= share <= 1.0:
            raise MirrorError(f"mirror share {share} is outside 0 to 1")
        if not key:
            raise MirrorError("the mirror's key is empty: set INFERLOOP_MIRROR_KEY")
        self._share, self._key, self._key_id = share, key, key_id(key)
        self._max_body_bytes = max_body_bytes
        self._files = _TrafficFiles(directory, rotate_bytes, rotate_seconds)
        self._queue: queue.Queue[Any] = queue.Queue(queue_size)
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._redactions: Counter[str] = Counter()
        self._queued_bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="mirror", daemon=True)
        self._thread.start()

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
                skipped=dict(self._skipped),
                redactions=dict(self._redactions),
            )

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

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued, finish the active file and stop; later offers are skipped."""
        if self._closed:
            return
        self._closed = True
        try:
            self._queue.put(_STOP, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)
        while not self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return
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
        if not is_sampled(conversation, self._share, self._key):
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
        while True:
            try:
                item = self._queue.get(timeout=SYNC_SECONDS)
            except queue.Empty:
                self._files.sync()
                continue
            if item is _STOP:
                break
            record, size = item
            reason = self._write(record)
            with self._lock:
                self._queued_bytes -= size
            self._skip(reason)
        self._files.finish()

    def _write(self, record: dict[str, Any]) -> str | None:
        """Write one record; returns why it was skipped, or None."""
        try:
            clean = self._prepare(record)
            line = TrafficRecord.model_validate(clean).model_dump_json(
                by_alias=True, exclude_none=True
            )
            data = line.encode() + b"\n"
            self._files.append(data)
        except ValidationError as error:
            _log.debug("a record is not valid traffic: %d errors", error.error_count())
            return "invalid"
        except OSError as error:
            _log.warning("cannot write traffic: %s", error)
            return "write_failed"
        except Exception:  # noqa: BLE001 - one odd record must not end the mirror
            return "failed"
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
        except Exception:  # noqa: BLE001 - fail closed, whatever went wrong
            clean = {k: v for k, v in record.items() if k not in PERSONAL}
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


class _TrafficFiles:
    """The active traffic file and its rotation. Used by the writing thread only."""

    def __init__(self, directory: Path, rotate_bytes: int, rotate_seconds: float) -> None:
        self._directory = directory
        self._rotate_bytes, self._rotate_seconds = rotate_bytes, rotate_seconds
        self._descriptor = -1
        self._path = Path()
        self._size = 0
        self._opened = self._synced = 0.0
        self._dirty = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._adopt()
        except OSError as error:
            raise MirrorError(f"cannot write traffic to {directory}: {error.strerror}") from error

    def append(self, line: bytes) -> None:
        """Add a whole line or nothing; raises OSError (disk full) and can be called again."""
        if self._descriptor < 0:
            self._open()
        try:
            written = os.write(self._descriptor, line)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        if written != len(line):
            os.ftruncate(self._descriptor, self._size)
            raise OSError(f"{self._path}: no room for {len(line)} bytes")
        self._size += written
        self._dirty = True
        self.sync()

    def sync(self) -> None:
        """Sync once a second; rotate when the file is large or old enough."""
        now = time.monotonic()
        if self._dirty and now - self._synced >= SYNC_SECONDS:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                _log.warning("cannot sync %s: %s", self._path, error)
            self._dirty, self._synced = False, now
        full = self._size >= self._rotate_bytes or now - self._opened >= self._rotate_seconds
        if self._descriptor >= 0 and full:
            self.finish()

    def finish(self) -> None:
        """Make the active file a finished one."""
        if self._descriptor < 0:
            return
        try:
            os.fsync(self._descriptor)
            _finish(self._path)
        except OSError as error:
            _log.warning("cannot finish %s: %s", self._path, error)
        os.close(self._descriptor)
        self._descriptor, self._dirty = -1, False

    def _open(self) -> None:
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = self._directory / f"traffic-{started}-{os.getpid()}.jsonl.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._path, self._size = path, 0
        self._opened = self._synced = time.monotonic()

    def _adopt(self) -> None:
        """Finish the files of processes that are gone: theirs are the ones without a lock."""
        for path in self._directory.glob("traffic-*.jsonl.part"):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                _finish(path)


def _finish(path: Path) -> None:
    path.rename(path.with_suffix(""))
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
