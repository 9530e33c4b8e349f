"""Which conversations are mirrored, and the pseudonyms under which their clients are known.

All of it derives from one key: choices are reproducible, and cannot be guessed or undone without
the key. Not for what is written of a request (`capture.mirror`).
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from capture.errors import CaptureError

OPENING_PREFIX = "opening-"
"""How the id of a conversation begins that its client gave no name."""

OPENING_CHARS = 16_384
"""So much of an opening counts: a body that was cut further back still names its conversation."""

INSTRUCTIONS = ("system", "developer")
"""Roles whose messages open no conversation: they may hold a date, and change with every turn."""


class MirrorError(CaptureError):
    """The mirror cannot start: bad share, key or directory."""


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


def opening_id(key: bytes, tenant: str, messages: Iterable[dict[str, Any]]) -> str | None:
    """The id of a conversation that its client did not name, from how it opens; None without an
    opening.

    Every turn repeats the messages before it, so all turns have the first one in common: they get
    the same id. So do conversations of a tenant that open with the same words: they are kept or
    left out together, and `opening-` tells that it is no more than that.
    """
    for message in messages:
        if message.get("role") not in INSTRUCTIONS:
            text = json.dumps([tenant, _text(message.get("content"))[:OPENING_CHARS]])
            return OPENING_PREFIX + keyed_digest(key, b"opening", text).hex()[:24]
    return None


def _text(content: Any) -> str:
    """A message's text, whether it came as a string or in parts; of other content its JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        fields = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [text for text in fields if isinstance(text, str)]
        if texts or not content:
            return "".join(texts)
    return json.dumps(content, sort_keys=True)


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
