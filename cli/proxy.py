"""`inferloop proxy`: capture in front of an OpenAI-compatible server that we did not write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.main import app


@app.command()
def proxy(
    upstream: Annotated[str, typer.Option(help="the server, such as http://127.0.0.1:8001")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0: any free one", min=0, max=65535)] = 8000,
    mirror_share: Annotated[
        float | None,
        typer.Option(
            "--mirror-share",
            "--mirror",
            min=0.0,
            max=1.0,
            help="share of conversations to write as traffic; default: INFERLOOP_MIRROR_SHARE",
        ),
    ] = None,
    trace: Annotated[bool, typer.Option(help="write the trace ring")] = True,
    timeout_s: Annotated[
        float, typer.Option(help="silence of the upstream that ends a request", min=0.1)
    ] = 600.0,
    capture_mib: Annotated[
        int, typer.Option(help="bytes of a request or an answer that are captured", min=1, max=1024)
    ] = 4,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="serve HTTPS with this certificate (PEM, with those that vouch for it)"),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="its key, where that is another file (PEM, no password)")
    ] = None,
) -> None:
    """Forward requests byte for byte to any OpenAI-compatible server (vLLM, SGLang, llama.cpp),
    and write what passes as trace and traffic, as for our own engine.

    Own pages: /inferloop/health and /inferloop/metrics. Ctrl-C or SIGTERM finishes
    the requests in flight, then stops.

    Example:  inferloop proxy --upstream http://127.0.0.1:8001 --port 8000 --mirror 1.0
    """
    import logging

    from capture.proxy.command import ProxyOptions, listen, run_proxy, tls_context
    from capture.settings import Settings

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    settings = Settings()
    share = settings.mirror_share if mirror_share is None else mirror_share
    if tls_cert is None and tls_key is not None:
        raise typer.BadParameter("--tls-key goes with --tls-cert")
    tls = None if tls_cert is None else tls_context(tls_cert, tls_key)
    options = ProxyOptions(upstream, share, trace, timeout_s, capture_mib << 20, tls)
    with listen(host, port) as listener:
        address = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        where = f"{scheme}://{address}:{listener.getsockname()[1]}"
        ready = f"inferloop: proxying {upstream} on {where}"
        run_proxy(options, settings, listener, lambda: typer.echo(ready))
