"""Writes a random 2-layer Llama as a GGUF file, so that tests need no real model.

Byte-level vocabulary: 256 bytes, a few merges, and ChatML's control tokens. Its text is noise,
but everything of a real file is there: Q4_1 and Q8_0 tensors, grouped heads, a chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.tokenizer import byte_alphabet

LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 2, 64, 4, 2, 16, 96, 512
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "o r", "Ġ t", "Ġt he", "i n", "e r", "Ã ©"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_vocabulary() -> list[str]:
    """Control tokens, then the 256 bytes, then what the merges make."""
    by_byte = sorted(byte_alphabet().items(), key=lambda item: item[1])
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*CONTROL_TOKENS, *(character for character, _ in by_byte), *merged]


def write_tiny_model(path: Path, *, seed: int = 0, metadata: dict[str, Any] | None = None) -> Path:
    """Write the model to `path`; `metadata` replaces values (None removes a key)."""
    import gguf

    rng = np.random.default_rng(seed)
    tokens = tiny_vocabulary()
    values: dict[str, Any] = {
        "general.name": "tiny",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": DIM,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    values.update(metadata or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        _write_value(writer, key, value)
    _add_tensors(writer, rng, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif value is not None:
        writer.add_string(key, value)


def _add_tensors(writer: Any, rng: np.random.Generator, vocabulary: int) -> None:
    import gguf

    def add(name: str, n: int, k: int, kind: Any) -> None:
        values = rng.normal(0, k**-0.5, (n, k)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    add("token_embd.weight", vocabulary, DIM, q8)
    for layer in range(LAYERS):
        for name, n, k in (
            ("attn_q", q, DIM), ("attn_k", kv, DIM), ("attn_v", kv, DIM), ("attn_output", DIM, q),
            ("ffn_gate", FFN, DIM), ("ffn_up", FFN, DIM), ("ffn_down", DIM, FFN),
        ):  # fmt: skip
            add(f"blk.{layer}.{name}.weight", n, k, q4)
        for name in ("attn_norm", "ffn_norm"):
            norm = rng.uniform(0.5, 1.5, DIM).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
    writer.add_tensor("output_norm.weight", np.ones(DIM, np.float32))
