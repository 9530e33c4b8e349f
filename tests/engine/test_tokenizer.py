"""Tokenizer and chat template against independent implementations."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.errors import TemplateError
from engine.gguf import GGUFFile
from engine.runner import LoadedModel
from engine.tokenizer import Tokenizer, byte_alphabet

TEXTS = [
    "Hello world", "  leading and   inner spaces  ", "line\n\n\nbreaks\r\n\ttabs",
    "don't we'll I'M", "2026-11-29 12:30 costs 1,234,567.89€ v1.2.3",
    "今天天气很好，我们去公园吧。", "한국어와 日本語",
    "emoji 😀👩‍👩‍👧‍👦🇫🇷 ok", "naïve café Zürich Ωμέγα", "x=[i**2 for i in range(10)]  # ok", "",
    "٣٤٥ ½ ² ①", "\u0000\u007f\u00a0\u200b\ufeff", "<|im_start|>user\nhi<|im_end|>", "a" * 300,
]  # fmt: skip


@pytest.fixture(scope="module")
def real_tokenizer(real_file: GGUFFile) -> Tokenizer:
    return Tokenizer(real_file)


@pytest.fixture(scope="module")
def reference(real_file: GGUFFile) -> Any:
    """A plain BPE in this file: GPT-2's pattern after splitting digits, merges by rank."""
    import regex

    tokens = real_file.metadata["tokenizer.ggml.tokens"]
    merges = real_file.metadata["tokenizer.ggml.merges"]
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letter = {byte: character for character, byte in byte_alphabet().items()}
    pattern = regex.compile(
        r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def encode(text: str) -> list[int]:
        found = []
        # Numeric characters in the sense of Unicode's N* categories stand alone.
        for piece in regex.split(r"(\p{N})", text):
            for word in pattern.findall(piece):
                parts = [letter[byte] for byte in word.encode()]
                while len(parts) > 1:
                    pairs = list(itertools.pairwise(parts))
                    best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                    if best not in ranks:
                        break
                    at = pairs.index(best)
                    parts[at : at + 2] = [best[0] + best[1]]
                found += [ids[part] for part in parts if part in ids]
        return found

    return encode


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_an_independent_bpe(
    text: str, real_tokenizer: Tokenizer, reference: Any
) -> None:
    assert real_tokenizer.encode(text) == reference(text)


@pytest.mark.model
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives(text: str, real_tokenizer: Tokenizer, reference: Any) -> None:
    ids = real_tokenizer.encode(text)
    assert ids == reference(text)
    known = {real_tokenizer.token_bytes(i) for i in range(real_tokenizer.vocab_size)}
    kept = bytes(byte for byte in text.encode() if bytes([byte]) in known)
    assert b"".join(real_tokenizer.token_bytes(i) for i in ids) == kept
    assert real_tokenizer.decode(ids) == kept.decode("utf-8", "replace")


def test_bytes_outside_any_merge_survive(tiny_model: LoadedModel) -> None:
    tokenizer = tiny_model.tokenizer
    text = "hello the wörld 中文 😀 12"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    half = [i for i in ids if tokenizer.token_bytes(i)[:1] == "中".encode()[:1]]
    assert tokenizer.decode(half) == "\ufffd"


def test_control_tokens_are_recognised_only_when_asked(tiny_model: LoadedModel) -> None:
    tokenizer = tiny_model.tokenizer
    text = "<|im_start|>hi<|im_end|>"
    special = tokenizer.encode(text, special=True)
    assert (special[0], special[-1]) == (1, 2)
    plain = tokenizer.encode(text)
    assert not set(plain) & {0, 1, 2}
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(special) == "hi"
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.bos_id is None


@pytest.mark.model
def test_digits_stand_alone(real_tokenizer: Tokenizer) -> None:
    texts = [real_tokenizer.token_bytes(i) for i in real_tokenizer.encode("in 2026")]
    assert texts == [b"in", b" ", b"2", b"0", b"2", b"6"]


def test_fingerprints_name_the_vocabulary(tiny_model: LoadedModel) -> None:
    assert re.fullmatch("[0-9a-f]{32}", tiny_model.tokenizer.fingerprint)


@pytest.mark.model
def test_the_real_template(real_file: GGUFFile) -> None:
    template = ChatTemplate.from_gguf(real_file)
    user = {"role": "user", "content": "Hi"}
    assert template.render([user]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([{"role": "system", "content": "Be terse."}, user]) == (
        "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ raise_exception('system role not supported') }}", "system role not supported"),
        ("{{ messages[0]['content'] + 1 }}", "failed"),
        ("{{ 1 / 0 }}", "failed"),
        ("{{ messages[7].content.x }}", "failed"),
    ],
)
def test_templates_that_fail_or_misbehave_raise(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_broken_and_missing_templates() -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% for %}")
    with pytest.raises(TemplateError, match="/v1/completions"):
        ChatTemplate(None).render([])
