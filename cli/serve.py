"""`inferloop serve`: the embedded engine behind an OpenAI-compatible server."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import typer

from cli.main import app

if TYPE_CHECKING:
    from fastapi import FastAPI

    from capture.frames import TraceWriter
    from capture.mirroring.mirror_process import MirrorProcess
    from capture.settings import Settings
    from engine.core import Engine
    from engine.metrics import EngineMetrics
    from engine.runner import LoadedModel

UNSENT_S = 5
"""How long a shutdown waits for clients to take the last answers, after the engine has stopped."""

WeightFormat = Literal["int8", "int4", "fp32"]
Kernels = Literal["compiled", "torch"]

MANY_RINGS = 4
"""Rings in one place before serving warns that nobody collects them: they take shared memory."""


class ServeError(Exception):
    """The server cannot start; the message says why and what to do."""

    exit_code = 1


@dataclass(frozen=True)
class _Options:
    """The command's options, as they were given."""

    model: Path | None
    served_model_name: str | None
    weights: WeightFormat
    kernels: Kernels
    kv_block: int
    kv_tokens: int
    max_model_len: int | None
    threads: int | None
    max_running: int
    token_budget: int
    max_queue: int
    max_queue_tokens: int
    policy: Path | None
    mirror_share: float | None
    trace: bool
    marks_from_anywhere: bool


@app.command()
def serve(
    model: Annotated[
        Path | None, typer.Option(help="GGUF file; default: the installed SmolLM2 package")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="name clients use; default: the file's name")
    ] = None,
    weights: Annotated[WeightFormat, typer.Option(help="how weights are held")] = "int8",
    kernels: Annotated[
        Kernels, typer.Option(help="compiled, or the same decoder in PyTorch (slower)")
    ] = "compiled",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0: any free one", min=0, max=65535)] = 8000,
    kv_block: Annotated[int, typer.Option(help="tokens in a block of the KV cache")] = 16,
    kv_tokens: Annotated[int, typer.Option(help="tokens the KV cache holds")] = 16384,
    max_model_len: Annotated[
        int | None, typer.Option(help="longest prompt plus answer; default: the model's")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="default: all cores", min=1)] = None,
    max_running: Annotated[int, typer.Option(help="requests in the batch")] = 32,
    token_budget: Annotated[
        int, typer.Option(help="tokens computed in a step; smaller: steadier streams")
    ] = 96,
    max_queue: Annotated[int, typer.Option(help="waiting requests before 429")] = 1024,
    max_queue_tokens: Annotated[
        int, typer.Option(help="prompt tokens of waiting requests before 429")
    ] = 262_144,
    policy: Annotated[
        Path | None, typer.Option(help="feedback policy to follow; default: the home's")
    ] = None,
    mirror_share: Annotated[
        float | None,
        typer.Option(help="share of conversations to mirror; default: INFERLOOP_MIRROR_SHARE"),
    ] = None,
    trace: Annotated[bool, typer.Option(help="write the trace ring")] = True,
    marks_from_anywhere: Annotated[
        bool, typer.Option(help="take `inferloop mark` from other machines, too")
    ] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's completions and chat completions, traced token by token.

    Ctrl-C or SIGTERM finishes the running requests, then stops.

    Example:  inferloop serve --port 8000 --weights int8
    """
    from capture.settings import Settings

    listener = _listen(host, port)
    options = _Options(
        model, served_model_name, weights, kernels, kv_block, kv_tokens, max_model_len, threads,
        max_running, token_budget, max_queue, max_queue_tokens, policy, mirror_share, trace,
        marks_from_anywhere,
    )  # fmt: skip
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with ExitStack() as cleanup:
        cleanup.callback(listener.close)
        application, engine, title = _build(options, Settings(), cleanup)
        address = f"[{host}]" if ":" in host else host
        where = f"http://{address}:{listener.getsockname()[1]}"
        _run(application, engine, listener, ready=f"inferloop: serving {title} on {where}")


def _listen(host: str, port: int) -> socket.socket:
    """Take the port first: loading a model only to find it in use would waste a minute."""
    if not host:  # the system would take it for all addresses
        raise ServeError("--host is empty: give an address, 0.0.0.0 for all of this machine's")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} on {host} is in use: stop what listens there, or choose another "
                "with --port (0: any free one)"
            ) from error
        reason = error.strerror or str(error)
        raise ServeError(f"cannot listen on {host} port {port}: {reason}") from error


def _build(
    options: _Options, settings: Settings, cleanup: ExitStack
) -> tuple[FastAPI, Engine, str]:
    """Model, engine, trace, mirror and server, wired; and a line that says what is served."""
    from engine.admission import QueueLimits
    from engine.core import Engine
    from engine.fingerprint import digest_of
    from engine.marks import Marks
    from engine.metrics import EngineMetrics
    from engine.server import create_app
    from engine.step import Limits
    from engine.tracer import StepTracer

    limits = Limits(options.max_running, options.token_budget)
    queue_limits = QueueLimits(options.max_queue, options.max_queue_tokens)
    loaded = _load(options)
    name = options.served_model_name or str(loaded.info["name"])
    components = _components(loaded, options)
    info = {"fingerprint": digest_of(components), "model": name, **components}
    metrics = EngineMetrics(name)
    writer = _trace_writer(settings, cleanup) if options.trace else None
    tracer = None if writer is None else StepTracer(writer)
    if tracer is not None:
        tracer.engine(info)
    engine = Engine(
        loaded.runner,
        loaded.tokenizer,
        limits=limits,
        queue_limits=queue_limits,
        metrics=metrics,
        tracer=tracer,
        policy_path=options.policy or settings.policy_file,
    )
    application = create_app(
        engine,
        model_name=name,
        template=loaded.template,
        fingerprint=components,
        mirror=_mirror(options, settings, metrics, cleanup),
        marks=Marks(writer.mark if writer else None, from_anywhere=options.marks_from_anywhere),
    )
    _telemetry(settings, writer, metrics, cleanup)
    return application, engine, f"{name} ({options.weights}, build {digest_of(components)[:12]})"


def _load(options: _Options) -> LoadedModel:
    from engine.gguf import find_default_model
    from engine.runner import load_model

    name = options.served_model_name
    if name is not None and not (name and name.isprintable()):
        raise ServeError(f"--served-model-name is {name!r}: give printable characters")
    try:
        return load_model(
            options.model or find_default_model(),
            weights=options.weights,
            kernels=options.kernels,
            block_size=options.kv_block,
            kv_tokens=options.kv_tokens,
            max_model_len=options.max_model_len,
            threads=options.threads,
        )
    except MemoryError as error:
        raise ServeError(
            f"no memory for the model and a KV cache of {options.kv_tokens} tokens: "
            "lower --kv-tokens"
        ) from error


def _components(loaded: LoadedModel, options: _Options) -> dict[str, Any]:
    from engine.fingerprint import components_of

    return components_of(
        weights={"sha256": loaded.info["sha256"], "held_as": options.weights},
        tokenizer=loaded.tokenizer.fingerprint,
        template=loaded.template.fingerprint,
        configuration={
            "kv_block": options.kv_block,
            "kv_tokens": options.kv_tokens,
            "max_model_len": loaded.runner.max_model_len,
            "max_running": options.max_running,
            "token_budget": options.token_budget,
            "threads": options.threads,
            "kernels": loaded.info["kernels"],
        },
    )


def _trace_writer(settings: Settings, cleanup: ExitStack) -> TraceWriter:
    from capture.frames import TraceWriter
    from capture.ring import RingWriter

    waiting = list(settings.rings.glob("*.ring"))
    if len(waiting) >= MANY_RINGS:
        logging.warning(
            "%d rings of %d MiB in %s wait for a collector: run `inferloop collect`",
            len(waiting), sum(ring.stat().st_size for ring in waiting) >> 20, settings.rings,
        )  # fmt: skip
    engine_id = uuid4()
    ring = RingWriter.create(
        settings.rings / f"{engine_id}.ring",
        capacity_bytes=settings.ring_mib << 20,
        engine_id=engine_id,
    )
    cleanup.callback(ring.close)
    return TraceWriter(ring)


def _telemetry(
    settings: Settings, writer: TraceWriter | None, metrics: EngineMetrics, cleanup: ExitStack
) -> None:
    """Watch the devices and the process's memory, for the trace and for /metrics."""
    from capture.gpu.metrics import TelemetryCollector
    from capture.gpu.monitor import GpuMonitor
    from capture.gpu.telemetry import Telemetry
    from engine.memory import MemoryProbe

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    monitor = GpuMonitor(visible if settings.gpu_devices is None else settings.gpu_devices)
    telemetry = Telemetry(writer, monitor, MemoryProbe().read)
    cleanup.callback(telemetry.close)
    telemetry.start()
    metrics.registry.register(TelemetryCollector(telemetry, metrics.labels))


def _mirror(
    options: _Options, settings: Settings, metrics: EngineMetrics, cleanup: ExitStack
) -> MirrorProcess | None:
    """Where finished requests go, if any are kept."""
    from capture.mirroring.mirror_metrics import MirrorCollector
    from capture.mirroring.mirror_process import MirrorProcess

    share = settings.mirror_share if options.mirror_share is None else options.mirror_share
    if share == 0:
        return None
    mirror = MirrorProcess(settings, share)
    cleanup.callback(mirror.close)
    metrics.registry.register(MirrorCollector(mirror, "inferloop:mirror", metrics.labels))
    return mirror


def _run(application: FastAPI, engine: Engine, listener: socket.socket, *, ready: str) -> None:
    """Serve until SIGINT or SIGTERM, say when requests can come."""
    import uvicorn

    from engine.connections import PatientProtocol, bound_waits
    from engine.server import DRAIN_S

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                typer.echo(ready)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            engine.begin_stop(timeout_s=DRAIN_S)  # what does not end in time gets an answer, too
            await super().shutdown(sockets)

    config = uvicorn.Config(
        application,
        log_config=None,
        log_level="warning",
        access_log=False,
        http=PatientProtocol,
        timeout_graceful_shutdown=int(DRAIN_S) + UNSENT_S,
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it is done
        signal.signal(number, lambda *_: None)
    bound_waits(listener)
    _allow_connections()
    server = Server(config)
    server.run(sockets=[listener])
    if not server.started:
        raise ServeError("the server could not start: the log above says why")


def _allow_connections() -> None:
    """Raise the soft limit of open files to the hard one: the queue alone may hold more
    connections than the 1024 that many systems start with."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
