"""The decoder against independent implementations, on the real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runner import LoadedModel
from tests.engine.batches import all_logprobs

pytestmark = pytest.mark.model

TEXT = (
    "The capital of France is Paris. In 1969, 中文 text and an emoji 😀 followed;"
    " def add(a, b): return a + b\n\nThe sum of 12 and 30 is 42, and a sentence that goes on long"
    " enough fills several blocks of the cache: the quick brown fox jumps over the lazy dog while"
    " rain falls on the hills, the rivers rise, and the town below prepares for a wet weekend."
    " Water boils at 100 degrees Celsius at sea level; on a mountain it boils sooner, because"
)

# Relative RMS error of the centred logits, and agreement of the argmax: what is stated of each
# format. Measured on TEXT: float32 3e-6 and 1, INT8 0.062 and 0.95, INT4 0.044 and 0.98.
STATED = {"fp32": (1e-3, 1.0), "int8": (0.09, 0.85), "int4": (0.06, 0.9)}


@pytest.fixture(scope="module")
def reference(real_path: Path) -> Callable[[list[int]], np.ndarray]:
    """Log-probabilities of transformers' Llama with weights dequantized by the gguf package."""
    import torch

    model = _transformers_model(real_path)

    def logprobs(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits.double(), -1).numpy()

    return logprobs


def _transformers_model(path: Path) -> Any:
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    heads = {"attn_q": 9, "attn_k": 3}
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:  # GGUF interleaves the two halves that transformers rotates
                halves = values.reshape(heads[parts[2]], 32, 2, 576)
                values = halves.swapaxes(1, 2).reshape(values.shape)
            state[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = values
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
            state[f"{name}.weight"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_logits_match_transformers(
    weights: str,
    real_model: Callable[..., LoadedModel],
    reference: Callable[[list[int]], np.ndarray],
) -> None:
    model = real_model(weights)
    ids = model.tokenizer.encode(TEXT)
    ours = all_logprobs(model.runner, ids, [(7 * i) % 31 for i in range(31)])
    expected = reference(ids)
    error, agreement = STATED[weights]
    centred = expected - expected.mean(axis=1, keepdims=True)
    difference = (ours - ours.mean(axis=1, keepdims=True)) - centred
    relative = np.sqrt((difference**2).mean() / (centred**2).mean())
    agreeing = (ours.argmax(axis=1) == expected.argmax(axis=1)).mean()
    print(f"{weights}: relative RMS error {relative:.2e}, same argmax {agreeing:.3f}")
    assert relative < error
    assert agreeing >= agreement
