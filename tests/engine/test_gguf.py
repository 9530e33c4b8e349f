"""Reading GGUF files: the numbers, and clear refusals of bad files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.gguf import GGUFFile, find_default_model, load_gguf
from engine.llama import LlamaConfig
from engine.runner import load_model
from tests.engine.tiny_model import write_tiny_model


def test_all_tensors_are_those_of_the_gguf_package(tiny_path: Path) -> None:
    import gguf

    file = load_gguf(tiny_path)
    reader = gguf.GGUFReader(tiny_path)
    assert len(file.tensors) == len(reader.tensors) == 20
    for theirs in reader.tensors:
        expected = gguf.dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(file.tensors[theirs.name].dequantize(), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_every_tensor_type_is_read_exactly(tmp_path: Path, kind: str) -> None:
    import gguf

    values = np.random.default_rng(0).normal(0, 2, (6, 64)).astype(np.float32)
    dtype = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(values, dtype)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = load_gguf(tmp_path / "x.gguf").tensors["x"]
    expected = gguf.dequantize(data, dtype).astype(np.float32)
    assert np.array_equal(tensor.dequantize(), expected)
    assert np.array_equal(tensor.rows(np.array([4, 1])), expected[[4, 1]])


@pytest.mark.model
def test_the_real_file(real_file: GGUFFile) -> None:
    config = LlamaConfig.from_gguf(real_file)
    assert (config.layers, config.dim, config.heads, config.kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.context, config.rope_base) == (49152, 8192, 100000.0)
    assert find_default_model() == real_file.path


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf: No such file.*--model"):
        load_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelFileError, match="Is a directory"):
        load_gguf(tmp_path)
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="is empty"):
        load_gguf(tmp_path / "empty.gguf")
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelFileError, match="not a GGUF file: it starts with b'PK"):
        load_gguf(tmp_path / "zip.gguf")


@pytest.mark.parametrize("version", [1, 4, 50331648])
def test_other_versions_are_refused(tmp_path: Path, tiny_path: Path, version: int) -> None:
    data = bytearray(tiny_path.read_bytes())
    data[4:8] = struct.pack("<I", version)
    (tmp_path / "v.gguf").write_bytes(data)
    with pytest.raises(ModelFileError, match=f"version {version} is not supported"):
        load_gguf(tmp_path / "v.gguf")


def test_truncation_anywhere_is_reported(tmp_path: Path, tiny_path: Path) -> None:
    data = tiny_path.read_bytes()
    path = tmp_path / "cut.gguf"
    rng = np.random.default_rng(0)
    for size in [5, 8, 23, 24, 30, len(data) - 1, *rng.integers(24, len(data), 200)]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match="truncated"):
            load_gguf(path)


def test_damage_in_the_header_never_escapes_as_another_error(
    tmp_path: Path, tiny_path: Path
) -> None:
    data = tiny_path.read_bytes()
    rng = np.random.default_rng(1)
    path = tmp_path / "damaged.gguf"
    refused = []
    for _ in range(300):
        damaged = bytearray(data)
        damaged[int(rng.integers(8, 1500))] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            load_gguf(path)
        except ModelFileError as error:
            refused.append(str(error))
    assert refused
    assert all(path.name in message for message in refused)


def test_unsupported_tensor_types_are_named(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "q5.gguf", "llama")
    data = np.zeros((4, 22), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"attn_q\.weight' has type Q5_0.*Q8_0"):
        load_gguf(tmp_path / "q5.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": 3}, r"'blk\.2\.attn_q\.weight' is missing"),
        ({"llama.attention.head_count_kv": 4}, r"attn_k\.weight' has shape \(32, 64\)"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3 KV heads"),
        ({"llama.feed_forward_length": 100}, "length 100 is not a multiple of 32"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizer 'qwen2' is not supported"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "the tokenizer is damaged"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "269 tokens but 2 token types"),
    ],
)
def test_models_this_engine_cannot_run_are_refused(
    tmp_path: Path, metadata: dict, message: str
) -> None:
    path = write_tiny_model(tmp_path / "odd.gguf", metadata=metadata)
    with pytest.raises(ModelFileError, match=message):
        load_model(path, weights="int8", kv_tokens=64, threads=1)
