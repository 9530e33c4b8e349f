"""llama.cpp's side of bench_engine_cpu: runs in the environment of llama-cpp-python.

Loads the GGUF file named first with the threads named second, prints {"ready": ...}, then answers
each JSON line {"batch", "prompt", "tokens", "seed"} with {"prefill_s", "decode_s"}: `batch`
sequences of `prompt` random tokens each are prefilled, then decoded together greedily for
`tokens` steps, through llama.cpp's own batch interface.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp
import numpy as np

MAX_TOKENS = 2048
MAX_SEQUENCES = 16


class Peer:
    """One model and one context, driven step by step."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(quiet, None)
        self._quiet = quiet
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 8192
        params.n_batch = params.n_ubatch = MAX_TOKENS
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(MAX_TOKENS, 0, 1)

    def measure(self, batch: int, prompt: int, tokens: int, seed: int) -> dict[str, float]:
        """Seconds of prefilling all prompts and of `tokens` steps over all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        rng = np.random.default_rng(seed)
        prompts = rng.integers(1000, 40000, (batch, prompt)).tolist()
        began = time.perf_counter()
        rows = [
            (token, position, sequence, position == prompt - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        ids = self._step(rows)
        prefilled = time.perf_counter()
        for step in range(tokens):
            rows = [(token, prompt + step, seq, True) for seq, token in enumerate(ids)]
            ids = self._step(rows)
        return {
            "prefill_s": prefilled - began,
            "decode_s": time.perf_counter() - prefilled,
        }

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wants logits) rows; greedy token of each wanting row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._best(i) for i, row in enumerate(rows) if row[3]]

    def _best(self, index: int) -> int:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocab_size,)).argmax())


def main() -> None:
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": True, "version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.measure(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
