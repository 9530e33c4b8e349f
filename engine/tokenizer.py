"""Byte-level BPE built from the vocabulary and merges that a GGUF file carries.

The file is the only source: nothing is downloaded, and the ids are the model's by construction.
Not for incremental output: that is `engine.detokenizer`, which works on `token_bytes`.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from engine.errors import ModelFileError
from engine.gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SUPPORTED_PRE = ("smollm", "gpt-2", "default")


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's table).

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, for the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return table


class Tokenizer:
    """Text <-> ids of one model.

    `eos_ids` end a generation; `bos_id` is None when the model wants none in front of a prompt;
    `fingerprint` is hex over vocabulary, kinds and merges. `control_tokens` are the texts that
    `encode` recognises with `special`; `longest_token` is the most bytes that one token holds.
    """

    def __init__(self, file: GGUFFile) -> None:
        model = file.require("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelFileError(
                f"{file.path}: tokenizer model {model!r} is not supported (supported: 'gpt2',"
                " byte-level BPE)"
            )
        pre = file.metadata.get("tokenizer.ggml.pre", "default")
        if pre not in SUPPORTED_PRE:
            raise ModelFileError(
                f"{file.path}: pre-tokenizer {pre!r} is not supported (supported:"
                f" {', '.join(SUPPORTED_PRE)})"
            )
        tokens: list[str] = file.require("tokenizer.ggml.tokens")
        kinds: list[int] = file.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
        merges: list[str] = file.require("tokenizer.ggml.merges")
        if len(kinds) != len(tokens):
            raise ModelFileError(
                f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types: damaged file"
            )
        self.vocab_size = len(tokens)
        self.bos_id = self._bos(file)
        self.eos_ids = self._eos(file, tokens)
        self._bytes = _all_token_bytes(tokens, kinds)
        self.control_tokens = tuple(
            token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL
        )
        self.longest_token = max(map(len, [*self._bytes, *map(str.encode, self.control_tokens)]))
        self._plain = _build(file, tokens, kinds, merges, pre, special=False)
        self._special = _build(file, tokens, kinds, merges, pre, special=True)
        self.fingerprint = xxhash.xxh3_128_hexdigest(
            json.dumps([tokens, kinds, merges, pre, self.bos_id, sorted(self.eos_ids)]).encode()
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`.

        With `special`, control tokens written in the text become their ids: for what a chat
        template writes, never for text that a user typed. Bytes that the vocabulary lacks (SmolLM2:
        six control characters and lead bytes of unassigned planes) are dropped, as the model's
        own tokenizer does.
        """
        encoder = self._special if special else self._plain
        # Of the library's methods only those for batches let other threads run meanwhile.
        return encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for, b"" for a control token; they need not be whole
        characters."""
        return self._bytes[token_id]

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", "replace")

    @staticmethod
    def _bos(file: GGUFFile) -> int | None:
        if not file.metadata.get("tokenizer.ggml.add_bos_token", False):
            return None
        return int(file.require("tokenizer.ggml.bos_token_id"))

    @staticmethod
    def _eos(file: GGUFFile, tokens: list[str]) -> frozenset[int]:
        """The file's end tokens plus the end-of-turn and end-of-text markers by name."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = {file.metadata.get(f"tokenizer.ggml.{key}") for key in keys} - {None}
        names = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"}
        return frozenset(found | {i for i, token in enumerate(tokens) if token in names})


def _all_token_bytes(tokens: list[str], kinds: list[int]) -> list[bytes]:
    alphabet = byte_alphabet()
    table = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN, UNUSED):
            table.append(b"")
        elif kind == USER_DEFINED or any(c not in alphabet for c in token):
            table.append(token.encode())
        else:
            table.append(bytes(alphabet[c] for c in token))
    return table


def _build(
    file: GGUFFile, tokens: list[str], kinds: list[int], merges: list[str], pre: str, special: bool
) -> Any:
    """A `tokenizers.Tokenizer`; `special` also registers the control tokens."""
    from tokenizers import AddedToken, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        backend = Backend(BPE(vocabulary, pairs))
    except Exception as error:  # the library raises bare Exception for a merge out of vocabulary
        raise ModelFileError(f"{file.path}: the tokenizer is damaged: {error}") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([digits, byte_level]) if pre == "smollm" else byte_level
    )
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == USER_DEFINED or (special and kind == CONTROL)
    ]
    backend.add_tokens(added)
    return backend
