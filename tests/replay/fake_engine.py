"""A small OpenAI-compatible server with a deterministic toy language model and planted faults.

`python -m tests.replay.fake_engine --port N --fault NAME ...`; with `--all` every single fault is
served under its name as a path, and the faultless engine under /plain. Prompt tokens are the bytes
of the rendered prompt; each next token is a hash of everything before it. Faults: see FAULTS.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

FAULTS = {
    "template": "puts a system prompt into the rendered prompt",
    "bos": "doubles the first prompt token, the rendered prompt being the same",
    "sampling": "samples at temperature 0.7 unless told otherwise",
    "stop": "stops at 'end' besides what was asked",
    "flip": "draws another token at output position 3",
    "detokenizer": "loses the umlaut of a token's text",
    "finish": "says length where it means stop",
    "slow": "takes 30 times as long for a token",
    "errors": "answers every third request with 500",
    "crash": "exits when the fifth request arrives",
    "noise": "draws another token at position 5 in every other request, at random",
    "foreign": "knows nothing beyond OpenAI's API and refuses what it does not know",
    "locked": "wants the API key letmein",
    "helper": "starts a helper process that ignores SIGTERM, in a session of its own",
}
WORDS = [
    *("the", "river", "runs", "past", "grey", "walls", "and", "中", "文", "字", "🙂", "grün"),
    *(",", ".", "end\n", "old", "songs", "stay", "here", "now"),
]
FIRST_ID = 300
FOREIGN_FIELDS = {"return_token_ids", "top_k", "stop_token_ids", "ignore_eos"}


class Toy:
    """The toy model."""

    def __init__(self, faults: set[str]) -> None:
        self.faults = faults

    def prompt_ids(self, rendered: str) -> list[int]:
        ids = list(rendered.encode())
        return [ids[0], *ids] if "bos" in self.faults else ids

    def text(self, token_id: int) -> str:
        word = WORDS[token_id - FIRST_ID]
        return (word.replace("ü", "u") if "detokenizer" in self.faults else word) + " "

    def logprobs(self, context: list[int]) -> list[float]:
        """Log-probability of each word, from a hash of the context."""
        digest = hashlib.shake_128(json.dumps(context).encode()).digest(len(WORDS))
        return [-0.1 - byte / 16 for byte in digest]

    def generate(
        self, prompt: list[int], sampling: dict[str, Any]
    ) -> list[tuple[int, float, float]]:
        """(token id, logprob, margin) until the limit, or a hash says stop."""
        out: list[tuple[int, float, float]] = []
        # The bytes 1.. instead of all: a doubled first token must not change the answer.
        context = [hash_of(prompt[-40:]), sampling["seed"] if sampling["temperature"] > 0 else 0]
        limit = min(sampling["max_tokens"], 8 + context[0] % 12)
        while len(out) < limit:
            logprobs = self.logprobs(context)
            order = sorted(range(len(WORDS)), key=lambda i: -logprobs[i])
            choice = 1 if self._flips(len(out)) else 0
            token = FIRST_ID + order[choice]
            margin = logprobs[order[0]] - logprobs[order[1]]
            out.append((token, logprobs[order[choice]], margin))
            context.append(token)
        return out

    def _flips(self, position: int) -> bool:
        if "flip" in self.faults and position == 3:
            return True
        return "noise" in self.faults and position == 5 and os.urandom(1)[0] % 2 == 0


def hash_of(ids: list[int]) -> int:
    return int.from_bytes(hashlib.blake2s(json.dumps(ids).encode(), digest_size=4).digest(), "big")


def create_app(faults: set[str], token_ms: float) -> FastAPI:
    app = FastAPI()
    toy = Toy(faults)
    foreign = "foreign" in faults
    token_s = token_ms / 1000 * (30 if "slow" in faults else 1)
    count = 0

    if "locked" in faults:

        @app.middleware("http")
        async def check_key(request: Request, call_next: Any) -> Response:
            if request.headers.get("authorization") != "Bearer letmein":
                return JSONResponse({"error": {"message": "no key"}}, status_code=401)
            return await call_next(request)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "toy", "object": "model", "created": 1}]}

    if not foreign:

        @app.get("/inferloop/build")
        async def build() -> dict[str, Any]:
            kinds = sorted(faults)
            return {
                "fingerprint": f"toy-{'-'.join(kinds) or 'plain'}",
                "components": {"faults": kinds},
            }

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, await request.json(), chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, await request.json(), chat=False)

    async def answer(request: Request, body: dict[str, Any], *, chat: bool) -> Response:
        nonlocal count
        count += 1
        if "crash" in faults and count == 5:
            print("fatal: the toy fell apart", flush=True)
            os._exit(7)
        if "errors" in faults and count % 3 == 0:
            return JSONResponse({"error": {"message": "the toy is broken"}}, status_code=500)
        if foreign and FOREIGN_FIELDS & set(body):
            message = f"unknown field {sorted(FOREIGN_FIELDS & set(body))[0]}"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        rendered = render(body, chat)
        ids = body["prompt"] if isinstance(body.get("prompt"), list) else toy.prompt_ids(rendered)
        sampling = {
            "max_tokens": body.get("max_tokens", 16),
            "temperature": body.get("temperature", 0.7 if "sampling" in faults else 0.0),
            "top_p": body.get("top_p", 1.0),
            "seed": body.get("seed", 0),
            "stop": [*body.get("stop", []), *(["end"] if "stop" in faults else [])],
        }
        if "prompt_logprobs" in body:
            return JSONResponse(score(ids))
        tokens = toy.generate(ids, sampling)
        stream = stream_answer(body, chat, rendered, ids, sampling, tokens, request)
        return StreamingResponse(stream, media_type="text/event-stream")

    def render(body: dict[str, Any], chat: bool) -> str:
        if not chat:
            return str(body["prompt"])
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in body["messages"])
        return ("<system>Be kind." if "template" in faults else "") + turns + "<assistant>"

    def score(ids: list[int]) -> dict[str, Any]:
        entries: list[Any] = [None]
        for at in range(1, len(ids)):
            value = -float(hash_of(ids[at - 1 : at + 1]) % 100) / 10
            entries.append({str(ids[at]): {"logprob": value, "rank": 1, "decoded_token": ""}})
        return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": entries}]}

    async def stream_answer(
        body: dict[str, Any],
        chat: bool,
        rendered: str,
        ids: list[int],
        sampling: dict[str, Any],
        tokens: list[tuple[int, float, float]],
        request: Request,
    ) -> AsyncIterator[bytes]:
        def event(choice: dict[str, Any] | None, **more: Any) -> bytes:
            data = {"choices": [] if choice is None else [{"index": 0} | choice]} | more
            return b"data: " + json.dumps(data).encode() + b"\n\n"

        wants_ids = bool(body.get("return_token_ids"))
        if chat:
            first = {"prompt_token_ids": ids} if wants_ids else {}
            yield event({"delta": {"role": "assistant", "content": ""}}, **first)
        sent, reason = "", "length" if len(tokens) == sampling["max_tokens"] else "stop"
        for token, logprob, margin in tokens:
            await asyncio.sleep(token_s)
            text = toy.text(token)
            if any(stop in sent + text for stop in sampling["stop"]):
                reason = "stop"
                break
            sent += text
            entry = {"logprob": logprob, "top_logprobs": []}
            if body.get("top_logprobs"):
                entry["top_logprobs"] = [{"logprob": -0.1}, {"logprob": -0.1 - margin}]
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if body.get("logprobs"):
                lists = {
                    "token_logprobs": [logprob],
                    "top_logprobs": [{"a": -0.1, "b": -0.1 - margin}],
                }
                choice["logprobs"] = {"content": [entry]} if chat else lists
            if wants_ids:
                choice["token_ids"] = [token]
            yield event(choice)
        if "finish" in faults:
            reason = "length"
        yield event(
            {"delta": {}, "finish_reason": reason}
            if chat
            else {"text": "", "finish_reason": reason}
        )
        detail = {
            "rendered_prompt": rendered,
            "sampling": sampling,
            "margins": [margin for _, _, margin in tokens],
            "class_key": f"{request.headers.get('x-tenant')}/{request.headers.get('x-route')}/-",
        }
        asked = request.headers.get("x-inferloop-detail") == "1" and not foreign
        yield event(None, usage={}, **({"inferloop": detail} if asked else {}))
        yield b"data: [DONE]\n\n"

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    listener = parser.add_mutually_exclusive_group(required=True)
    listener.add_argument("--port", type=int)
    listener.add_argument("--fd", type=int, help="of a socket that listens already")
    parser.add_argument("--fault", action="append", default=[], choices=FAULTS)
    parser.add_argument("--token-ms", type=float, default=1.0)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    if "helper" in arguments.fault:
        program = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        )
        helper = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        print(f"helper {helper.pid}", flush=True)
    print(f"toy engine with faults {arguments.fault}", flush=True)
    app = create_app(set(arguments.fault), arguments.token_ms)
    if arguments.all:
        for name in FAULTS:
            app.mount(f"/{name}", create_app({name}, arguments.token_ms))
        app.mount("/plain", create_app(set(), arguments.token_ms))
        app.mount("/foreign-detokenizer", create_app({"foreign", "detokenizer"}, 1.0))
    if arguments.fd is None:
        socket_ = socket.create_server(("127.0.0.1", arguments.port), backlog=2048)
    else:
        socket_ = socket.socket(fileno=arguments.fd)
    # On a busy machine a client's idle second may be this process's ten.
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=300)
    uvicorn.Server(config).run(sockets=[socket_])


if __name__ == "__main__":
    main()
