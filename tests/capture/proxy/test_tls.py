"""HTTPS towards the proxy's clients, and answers in a coding that it cannot read."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from capture.decode import EventFrame, FinishFrame, RequestFrame
from capture.proxy.address import ProxyError
from capture.proxy.command import tls_context
from tests.capture.proxy.nasty import Conversation, Nasty, answer_hello
from tests.capture.proxy.processes import PATIENT, ProxyProcess
from tests.capture.proxy.test_capture import CHAT, PLAIN, QUESTION, WHOLE, ask, streams
from tests.waiting import until


class Certificate(NamedTuple):
    cert: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """One that vouches for itself, for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    made = Certificate(directory / "cert.pem", directory / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", made.key, "-out", made.cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def secured(
    shared_upstream: Nasty, certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    options = ("--tls-cert", str(certificate.cert), "--tls-key", str(certificate.key))
    process = ProxyProcess(shared_upstream.url, tmp_path_factory.mktemp("home"), *options)
    yield process
    assert process.stop() == 0


@pytest.fixture
def client(secured: ProxyProcess, certificate: Certificate) -> Iterator[httpx.Client]:
    trust = ssl.create_default_context(cafile=str(certificate.cert))
    with httpx.Client(
        base_url=f"https://localhost:{secured.port}", verify=trust, **PATIENT
    ) as client:
        yield client


def connected(proxy: ProxyProcess, certificate: Certificate) -> ssl.SSLSocket:
    trust = ssl.create_default_context(cafile=str(certificate.cert))
    plain = socket.create_connection(("127.0.0.1", proxy.port), timeout=60)
    return trust.wrap_socket(plain, server_hostname="localhost")


def rest_of(connection: ssl.SSLSocket) -> bytes:
    """What comes until the peer's end."""
    got = b""
    while data := connection.recv(65536):
        got += data
    return got


def test_streams_and_pages_come_over_tls_and_are_captured(
    client: httpx.Client, secured: ProxyProcess, upstream: Nasty
) -> None:
    upstream.script = streams(*PLAIN)
    for number in range(2):  # on one connection
        headers = {"X-Conversation": f"secured-{number}"}
        answer = client.post(CHAT, json=QUESTION, headers=headers)
        assert (answer.status_code, answer.content) == (200, WHOLE)
        assert secured.record(f"secured-{number}")["output_text"] == "Grüße 😀 aus Köln"
    assert client.get("/inferloop/health").json()["status"] == "ok"


def test_who_speaks_plain_http_there_gets_nothing_and_others_go_on(
    client: httpx.Client, secured: ProxyProcess, upstream: Nasty
) -> None:
    upstream.script = answer_hello
    with socket.create_connection(("127.0.0.1", secured.port), timeout=60) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)
    assert client.get("/x").text == "hello"


def test_an_upload_that_is_answered_early_is_answered_over_tls_too(
    secured: ProxyProcess, certificate: Certificate
) -> None:
    with connected(secured, certificate) as connection:
        connection.sendall(
            b"POST /inferloop/health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        )
        connection.sendall(b"x" * 10_000)
        head = connection.recv(65536)
        assert b" 405 " in head.splitlines()[0]
        rest_of(connection)  # ends by the close of TLS


def test_an_answer_that_breaks_off_has_no_clean_end(
    secured: ProxyProcess, certificate: Certificate, upstream: Nasty
) -> None:
    """Without a length its end is the connection's: TLS must not confirm it."""

    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhalf an answ")
        await talk.until(lambda: talk.notes.get("seen"))
        talk.reset()

    upstream.script = script
    with connected(secured, certificate) as connection:
        connection.sendall(b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while not got.endswith(b"half an answ"):
            got += connection.recv(65536)
        (talk,) = [talk for talk in upstream.seen if talk.path == "/broken"]
        talk.notes["seen"] = True
        connection.suppress_ragged_eofs = False
        with pytest.raises((ConnectionResetError, ssl.SSLError)):
            rest_of(connection)


def test_an_answer_that_ends_by_its_connection_has_a_clean_end(
    secured: ProxyProcess, certificate: Certificate, upstream: Nasty
) -> None:
    async def script(talk: Conversation) -> None:
        await talk.body()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
        talk.writer.close()

    upstream.script = script
    with connected(secured, certificate) as connection:
        connection.suppress_ragged_eofs = False
        connection.sendall(b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n")
        got = rest_of(connection)
    assert got.endswith(b"all of it")


@pytest.mark.parametrize("what", ["missing", "nonsense", "other key", "password"])
def test_files_that_make_no_certificate_are_named(
    certificate: Certificate, tmp_path: Path, what: str
) -> None:
    cert, key = certificate
    if what == "missing":
        key = tmp_path / "no.pem"
    elif what == "nonsense":
        key = tmp_path / "key.pem"
        key.write_text("not a key")
    else:
        key = tmp_path / "key.pem"
        more = ["-aes256", "-passout", "pass:secret"] if what == "password" else []
        subprocess.run(
            ["openssl", "genrsa", *more, "-out", key, "2048"], check=True, capture_output=True
        )
    said = f"cannot read {key}: No such file" if what == "missing" else f"{cert} and {key} hold no"
    with pytest.raises(ProxyError, match=f"^{re.escape(said)}"):
        tls_context(cert, key)


def test_a_certificate_without_its_key_is_named(certificate: Certificate) -> None:
    cert, _ = certificate
    with pytest.raises(ProxyError, match=f"^{re.escape(str(cert))} holds no certificate"):
        tls_context(cert, None)


def test_a_coding_that_cannot_be_read_is_marked_in_the_trace(
    proxy: ProxyProcess, upstream: Nasty
) -> None:
    coded = b"\x0b\x02\x80hello\x03"
    upstream.script = streams(coded, headers="Content-Encoding: br")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    name, status, content = ask(
        proxy,
        body=json.dumps(QUESTION).encode(),
        traceparent=f"00-{trace_id}-00f067aa0ba902b7-01",
        accept_encoding="br",
    )
    assert (status, content) == (200, coded)
    assert upstream.seen[-1].header("accept-encoding") == "br"

    def ended() -> bool:
        slots = {f.slot for f in proxy.frames() if isinstance(f, RequestFrame)
                 and f.request_id == trace_id}  # fmt: skip
        return any(isinstance(f, FinishFrame) and f.slot in slots for f in proxy.frames())

    until(ended, "its end is traced")
    (event,) = [e for e in proxy.of_request(trace_id, EventFrame) if e.kind == "not_captured"]
    assert event.detail == "its tokens are not counted: encoding: cannot decode 'br'"
    (finish,) = proxy.of_request(trace_id, FinishFrame)
    assert (finish.reason, finish.output_tokens) == ("stop", 0)
    assert name not in {record["conversation_id"] for record in proxy.records()}
