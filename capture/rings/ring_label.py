"""Whose ring it is, kept in the file header, where no frame overwrites it: model and build.

Layout: docs/ring-format.md, "Label". Not the engine's whole description: that is its ENGINE frame.
"""

from __future__ import annotations

import json
import struct

from xxhash import xxh3_64_intdigest

LABEL_OFFSET = 2048
LABEL_BYTES = 2048
TEXT_CHARS = 128  # six bytes each at worst, escaped
_FIXED = struct.Struct("<QI")


def pack_label(model: str, fingerprint: str) -> bytes:
    """Checksum, length and text; texts are cut at 128 characters."""
    label = {"model": model[:TEXT_CHARS], "fingerprint": fingerprint[:TEXT_CHARS]}
    text = json.dumps(label, ensure_ascii=False).encode("utf-8", "replace")
    return _FIXED.pack(xxh3_64_intdigest(text), len(text)) + text


def unpack_label(data: bytes) -> dict[str, str] | None:
    """The label in the bytes from LABEL_OFFSET on; None: there is none, or not yet a whole one."""
    checksum, length = _FIXED.unpack_from(data)
    text = data[_FIXED.size : _FIXED.size + length]
    if not length or len(text) != length or xxh3_64_intdigest(text) != checksum:
        return None
    try:
        label = json.loads(text)
        return {key: str(label[key]) for key in ("model", "fingerprint")}
    except (ValueError, KeyError, TypeError, RecursionError):  # another program's ring
        return None
