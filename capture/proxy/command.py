"""Puts a proxy together from settings and runs it: ring, mirror, metrics, event loop.

Not for option parsing (`cli.proxy`).
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from capture.frames import TraceWriter
from capture.mirroring.mirror_process import MirrorProcess
from capture.proxy.address import Address, ProxyError, parse_upstream
from capture.proxy.core import Proxy
from capture.proxy.metrics import ProxyMetrics
from capture.proxy.recorder import Recorder
from capture.ring import RingWriter
from capture.settings import Settings

log = logging.getLogger("inferloop.proxy")

DESCRIBE_S = 10.0
"""How long the upstream may take to list its models at the start; nothing waits for it."""


@dataclass(frozen=True)
class ProxyOptions:
    """`mirror_share` of the conversations are written as traffic; `body_bytes` of a request and of
    an answer are captured at most; `silence_s` without a byte is a timeout; `tls` as for
    `Proxy`."""

    upstream: str
    mirror_share: float
    trace: bool
    silence_s: float
    body_bytes: int
    tls: ssl.SSLContext | None = None


def run_proxy(
    options: ProxyOptions,
    settings: Settings,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Serve on `listener` until SIGINT or SIGTERM. Raises ProxyError, RingError or MirrorError
    when it cannot start."""
    import httpx  # noqa: F401 - not while requests wait
    import uvloop

    address = parse_upstream(options.upstream)
    _allow_connections()
    with ExitStack() as cleanup:
        recorder = _recorder(options, settings, address, cleanup)
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options, address, recorder, listener, on_ready))


async def _serve(
    options: ProxyOptions,
    address: Address,
    recorder: Recorder,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    proxy = Proxy(address, recorder.metrics, recorder, silence_s=options.silence_s, tls=options.tls)
    describing = asyncio.create_task(_describe(address, recorder))
    await proxy.run(listener, on_ready)
    describing.cancel()


def _recorder(
    options: ProxyOptions, settings: Settings, address: Address, cleanup: ExitStack
) -> Recorder:
    metrics = ProxyMetrics()
    writer = _trace_writer(settings, cleanup) if options.trace else None
    mirror = _mirror(options, settings, metrics, cleanup) if options.mirror_share else None
    info = {
        "kind": "proxy",
        "upstream": address.url,
        "inferloop": importlib.metadata.version("inferloop"),
        "mirror_share": options.mirror_share,
    }
    return Recorder(metrics, writer, mirror, engine_info=info, body_bytes=options.body_bytes)


def _trace_writer(settings: Settings, cleanup: ExitStack) -> TraceWriter:
    engine_id = uuid4()
    ring = RingWriter.create(
        settings.rings / f"{engine_id}.ring",
        capacity_bytes=settings.ring_mib << 20,
        engine_id=engine_id,
    )
    cleanup.callback(ring.close)
    return TraceWriter(ring)


def _mirror(
    options: ProxyOptions, settings: Settings, metrics: ProxyMetrics, cleanup: ExitStack
) -> MirrorProcess:
    mirror = MirrorProcess(settings, options.mirror_share)
    cleanup.callback(mirror.close)
    metrics.watch_mirror(mirror)
    return mirror


async def _describe(address: Address, recorder: Recorder) -> None:
    """Ask the upstream for its models, for the trace. It may be down or want credentials: then
    the first answer has to do. `verify`: reading the system's certificates once more would hold
    the wire up."""
    import httpx

    try:
        async with httpx.AsyncClient(
            base_url=address.url, timeout=DESCRIBE_S, trust_env=False, verify=address.tls or False
        ) as http:
            answer = await http.get("/v1/models")
            models: Any = answer.json()["data"] if answer.status_code == 200 else None
            names = [str(model["id"]) for model in models] if models is not None else None
    except httpx.HTTPError as error:
        log.warning("the upstream does not answer yet: %s", str(error) or type(error).__name__)
        return
    except (ValueError, KeyError, TypeError):
        return
    if names is not None:
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        recorder.describe(headers, names[0] if names else "", models=names)


def _allow_connections() -> None:
    """Raise the soft limit of open files to the hard one: a client and its upstream take two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """What clients are met with: a PEM file with the certificate and those that vouch for it, and
    its key where it is another file. Raises ProxyError when they cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files = f"{certificate} holds" if key is None else f"{certificate} and {key} hold"
    try:
        for path in filter(None, (certificate, key)):
            path.open("rb").close()  # the library's error does not say which of them it is
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        raise ProxyError(
            f"{files} no certificate with its key that can be used ({reason}): give PEM "
            "files, the key without a password, to --tls-cert and --tls-key"
        ) from error
    except OSError as error:
        raise ProxyError(f"cannot read {error.filename}: {error.strerror}") from error
    return context


def _no_password() -> str:
    """Else OpenSSL would ask for one on the terminal."""
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ProxyError when there can be none."""
    if not host:
        raise ProxyError("--host is empty: give an address, 0.0.0.0 for all of this machine's")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ProxyError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port "
            "(0: any free one)"
        ) from error
