"""The proxy as a process: how it starts and stops, and what outlives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from capture.collector import Collector
from capture.decode import EngineFrame, StepFrame
from capture.lake import LakePlace, open_connection
from capture.proxy.core import DRAIN_S
from tests.capture.proxy.nasty import (
    DONE,
    Conversation,
    Nasty,
    answer_hello,
    chat_event,
    usage_event,
)
from tests.capture.proxy.processes import PATIENT, ProxyProcess, raw
from tests.proc import is_running
from tests.waiting import PATIENCE_S, until

Start = Callable[..., ProxyProcess]
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def fails(*arguments: str, **environment: str) -> str:
    """The one line that a proxy says which cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "cli", "proxy", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_start_that_must_fail(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = fails("--upstream", "http://h", "--port", port, INFERLOOP_HOME=str(tmp_path))
    assert f"port {port}: Address already in use" in message
    where = tmp_path / "file"
    where.touch()
    home = {"INFERLOOP_HOME": str(tmp_path), "INFERLOOP_RING_DIR": str(where)}
    message = fails("--upstream", "http://h", "--port", "0", **home)
    assert str(where) in message


def stream(proxy: ProxyProcess, got: list[bytes], **headers: str) -> threading.Thread:
    """Ask in a thread; what comes is appended to `got`, an error's name last."""

    def work() -> None:
        try:
            with httpx.stream(
                "POST", proxy.url + "/v1/chat/completions", json=QUESTION, headers=headers,
                **PATIENT,
            ) as answer:  # fmt: skip
                for piece in answer.iter_raw():
                    got.append(piece)
        except httpx.HTTPError as error:
            got.append(type(error).__name__.encode())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def has_two(got: list[bytes]) -> bool:
    """Whether the first two tokens have come."""
    return b"".join(got).count(b"data:") >= 2


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def slow_upstream(gate: threading.Event) -> object:
    """Sends two tokens, waits for the gate, sends the rest."""

    async def script(talk: Conversation) -> None:
        if talk.path == "/v1/models":
            await answer_hello(talk)
            return
        await talk.body()
        await talk.start_stream()
        await talk.events(chat_event("a"), chat_event("b"), pause_s=0.02)
        await talk.until(gate.is_set)
        await talk.events(
            chat_event("c"), chat_event(finish_reason="stop"), usage_event(5, 3), DONE,
            pause_s=0.02,
        )  # fmt: skip
        await talk.end_stream()

    server = Nasty()
    server.script = script
    yield server
    gate.set()
    server.close()


def collect(proxy: ProxyProcess) -> LakePlace:
    """Drain the proxy's ring into a lake."""
    place = LakePlace(str(proxy.home / "catalog.sqlite"), str(proxy.home / "data"))
    crashes = proxy.home / "crashes"
    stop = threading.Event()
    Collector(place, ring_dir=proxy.rings, crash_dir=crashes, stop=stop).run(once=True)
    return place


def refuses(port: int) -> bool:
    """Whether nobody listens any more; one who came just before the end is reset."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionResetError:
        return False
    except ConnectionRefusedError:
        return True
    return False


def test_stop_finishes_what_is_in_flight_and_the_lake_has_it(
    start_proxy: Start, tmp_path: Path, slow_upstream: Nasty, gate: threading.Event
) -> None:
    proxy = start_proxy(slow_upstream.url, tmp_path)
    got: list[bytes] = []
    thread = stream(proxy, got, **{"X-Tenant": "acme"})
    until(lambda: has_two(got), "two tokens")
    proxy.process.send_signal(signal.SIGTERM)
    until(lambda: refuses(proxy.port), "no new connections")
    gate.set()
    thread.join(PATIENCE_S)
    assert proxy.stop() == 0
    assert b"".join(got).endswith(DONE)

    with open_connection(collect(proxy)) as lake:
        rows = lake.execute(
            "SELECT tenant, outcome, output_tokens, prompt_tokens, ttft_ms, tpot_ms, duration_ms "
            "FROM request_latency"
        ).fetchall()
        gaps = lake.execute(
            "SELECT position, gap_ms, token_id, logprob, margin FROM token_gaps ORDER BY position"
        ).fetchall()
        steps = lake.execute(
            "SELECT count(*), count(forward_us), count(device_us), sum(decode_tokens) FROM steps"
        ).fetchall()
        usage = lake.execute("SELECT detail FROM events WHERE kind = 'usage'").fetchall()
        lost = lake.execute("SELECT count(*) FROM losses").fetchall()
        model = lake.execute("SELECT model FROM engines").fetchall()
    ((tenant, outcome, tokens, prompt, ttft_ms, tpot_ms, duration_ms),) = rows
    ((count, forwards, devices, decoded),) = steps
    assert (tenant, outcome, tokens, prompt) == ("acme", "stop", 3, None)
    assert 0 < ttft_ms < duration_ms
    assert tpot_ms == pytest.approx(sum(gap[1] for gap in gaps) / 2, rel=0.01)
    assert [gap[0] for gap in gaps] == [1, 2]
    assert {gap[2:] for gap in gaps} == {(-1, None, None)}
    assert 1 <= count <= 3, "tokens that come at once share a step"
    assert (forwards, devices, decoded) == (0, 0, 3)
    assert json.loads(usage[0][0])["prompt_tokens"] == 5
    assert (lost, model) == ([(0,)], [("tiny",)])


def tokens_in_ring(proxy: ProxyProcess) -> int:
    return sum(len(f.rows["slot"]) for f in proxy.frames() if isinstance(f, StepFrame))


@pytest.mark.kill
def test_ring_of_a_killed_proxy_is_drained(
    start_proxy: Start, tmp_path: Path, slow_upstream: Nasty
) -> None:
    proxy = start_proxy(slow_upstream.url, tmp_path)
    got: list[bytes] = []
    thread = stream(proxy, got)
    until(lambda: has_two(got), "two tokens")
    until(lambda: tokens_in_ring(proxy) == 2, "two tokens in the ring")
    proxy.stop(signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert got[-1] in (b"RemoteProtocolError", b"ReadError")
    with open_connection(collect(proxy)) as lake:
        outcome = lake.execute("SELECT outcome, output_tokens FROM request_latency").fetchall()
        tokens = lake.execute("SELECT count(*) FROM tokens").fetchall()
    assert outcome == [("engine_gone", None)]
    assert tokens == [(2,)]


def test_second_signal_waits_no_longer(
    start_proxy: Start, tmp_path: Path, slow_upstream: Nasty
) -> None:
    proxy = start_proxy(slow_upstream.url, tmp_path)
    got: list[bytes] = []
    thread = stream(proxy, got)
    until(lambda: has_two(got), "two tokens")
    began = time.monotonic()
    proxy.process.send_signal(signal.SIGINT)
    until(lambda: refuses(proxy.port), "no new connections")
    proxy.process.send_signal(signal.SIGINT)
    thread.join(PATIENCE_S)
    assert time.monotonic() - began < DRAIN_S
    assert proxy.stop() == 0
    assert got[-1] == b"RemoteProtocolError"
    (record,) = proxy.records()
    assert record["error_type"] == "proxy_stopped"


def last_error(proxy: ProxyProcess) -> str:
    health = httpx.get(proxy.url + "/inferloop/health", **PATIENT).json()
    return str(health["last_upstream_error"])


def test_upstream_that_is_down(start_proxy: Start, tmp_path: Path) -> None:
    unused = socket.socket()  # kept, so that nobody else gets the port; it does not listen
    unused.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    proxy = start_proxy(url, tmp_path)
    answer = httpx.post(proxy.url + "/v1/chat/completions", json=QUESTION, **PATIENT)
    error = answer.json()["error"]
    assert answer.status_code == 502
    assert error["code"] == "upstream_unreachable"
    assert url in error["message"]
    assert "cannot be reached" in last_error(proxy)
    (record,) = until(proxy.records, "a traffic record")
    assert (record["status"], record["error_type"]) == (502, "upstream_error")
    assert proxy.stop() == 0
    unused.close()


def test_what_is_refused_is_captured_though_its_body_comes_late(
    start_proxy: Start, tmp_path: Path
) -> None:
    """But a long one, or who waits to be told to send it, is refused at once."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = start_proxy(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path)
        body = json.dumps(QUESTION).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as late:
            late.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
            until(lambda: "cannot be reached" in last_error(proxy), "the refusal")
            late.sendall(body)
            assert late.recv(65536).startswith(b"HTTP/1.1 502 ")
        (record,) = until(proxy.records, "a traffic record")
        assert record["messages"] == QUESTION["messages"]
        for sent in (
            b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n",
            b"Content-Length: 9999999\r\n\r\n" + b"x" * 200_000,
        ):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as other:
                other.sendall(head + sent)
                assert other.recv(65536).startswith(b"HTTP/1.1 502 ")
        assert proxy.stop() == 0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=local", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-out", str(files[0]), "-keyout", str(files[1])),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_upstream_over_tls(
    start_proxy: Start, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    upstream = Nasty(tls)
    trusting = start_proxy(upstream.url, tmp_path / "a", SSL_CERT_FILE=str(certificate[0]))
    for _ in range(2):
        answer = raw(trusting.port, b"GET /x HTTP/1.1\r\nHost: mine\r\nConnection: close\r\n\r\n")
        assert answer.endswith(b"hello")
    hosts = {talk.header("host") for talk in upstream.seen if talk.path == "/x"}
    assert hosts == {upstream.url.removeprefix("https://")}
    doubting = start_proxy(upstream.url, tmp_path / "b")
    answer = raw(doubting.port, b"GET /x HTTP/1.1\r\nHost: mine\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"certificate" in answer
    assert (trusting.stop(), doubting.stop()) == (0, 0)
    upstream.close()


@pytest.mark.kill
def test_mirror_that_dies_does_not_stop_the_forwarding(
    start_proxy: Start, tmp_path: Path, slow_upstream: Nasty, gate: threading.Event
) -> None:
    gate.set()
    proxy = start_proxy(slow_upstream.url, tmp_path)
    os.kill(proxy.children()[0], signal.SIGKILL)

    def ask() -> str:
        got: list[bytes] = []
        stream(proxy, got).join(PATIENCE_S)
        assert b"".join(got).endswith(DONE)
        return httpx.get(proxy.url + "/inferloop/metrics", **PATIENT).text

    until(lambda: 'records_skipped_total{reason="mirror_gone"}' in ask(), "a skipped record")
    assert proxy.stop() == 0
    assert proxy.process.stderr is not None
    assert proxy.process.stderr.read().count("mirror's process has died") == 1


@pytest.mark.kill
def test_mirror_of_a_killed_proxy_writes_what_it_has(
    start_proxy: Start, tmp_path: Path, slow_upstream: Nasty, gate: threading.Event
) -> None:
    gate.set()
    proxy = start_proxy(slow_upstream.url, tmp_path)
    got: list[bytes] = []
    stream(proxy, got).join(PATIENCE_S)
    until(proxy.records, "a traffic record")
    (mirror,) = proxy.children()
    proxy.stop(signal.SIGKILL)
    until(lambda: not is_running(mirror), "the end of the mirror")
    assert not list((tmp_path / "traffic").glob("*.part"))
    assert len(proxy.records()) == 1


def test_traffic_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "traffic").touch()
    where = {"INFERLOOP_HOME": str(tmp_path), "INFERLOOP_RING_DIR": str(tmp_path / "rings")}
    message = fails("--upstream", "http://h", "--port", "0", "--mirror", "1", **where)
    assert "cannot write traffic" in message


def test_clients_words_do_not_end_the_trace(
    start_proxy: Start, tmp_path: Path, slow_upstream: Nasty, gate: threading.Event
) -> None:
    """An upstream that lists no models is described by what a client asks for."""
    gate.set()
    tell = slow_upstream.script

    async def no_models(talk: Conversation) -> None:
        if talk.path == "/v1/models":
            await talk.send(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        else:
            await tell(talk)

    slow_upstream.script = no_models
    proxy = start_proxy(slow_upstream.url, tmp_path)
    question = QUESTION | {"model": "m" * 2_000_000}
    httpx.post(proxy.url + "/v1/chat/completions", json=question, **PATIENT)
    until(proxy.records, "a traffic record")
    assert httpx.get(proxy.url + "/inferloop/health", **PATIENT).json()["trace"] == "ok"
    assert [frame.info["model"] for frame in proxy.frames() if isinstance(frame, EngineFrame)] == [
        "m" * 256
    ]
    assert proxy.stop() == 0


def test_trace_that_fails_later_does_not_stop_the_forwarding(
    start_proxy: Start, tmp_path: Path, slow_upstream: Nasty, gate: threading.Event
) -> None:
    """An ENGINE frame over the ring's limit stands for any error of the trace."""
    gate.set()

    async def many_models(talk: Conversation) -> None:
        if talk.path == "/v1/models":
            body = json.dumps({"data": [{"id": "m" * 2_000_000}]}).encode()
            await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            await script(talk)

    script = slow_upstream.script
    slow_upstream.script = many_models
    proxy = start_proxy(slow_upstream.url, tmp_path)
    health = proxy.url + "/inferloop/health"
    until(lambda: "FrameTooLarge" in httpx.get(health, **PATIENT).json()["trace"], "a failure")
    metrics = httpx.get(proxy.url + "/inferloop/metrics", **PATIENT).text
    assert "inferloop:proxy_trace_failed 1.0" in metrics
    got: list[bytes] = []
    stream(proxy, got).join(PATIENCE_S)
    assert b"".join(got).endswith(DONE)
    (record,) = until(proxy.records, "a traffic record")
    assert record["output_text"] == "abc"
    assert proxy.stop() == 0
    assert proxy.process.stderr is not None
    assert proxy.process.stderr.read().count("tracing stopped") == 1
