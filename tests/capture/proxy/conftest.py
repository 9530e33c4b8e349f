from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.capture.proxy.nasty import Nasty, answer_hello
from tests.capture.proxy.processes import ProxyProcess
from tests.waiting import until


@pytest.fixture(scope="session")
def shared_upstream() -> Iterator[Nasty]:
    server = Nasty()
    yield server
    server.close()


@pytest.fixture(scope="session")
def shared_proxy(
    shared_upstream: Nasty, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    """It waits for its upstream as long as a busy machine may need."""
    with ProxyProcess(shared_upstream.url, tmp_path_factory.mktemp("home")) as process:
        until(process.knows_its_upstream, "it knows its upstream")
        yield process
        assert process.stop() == 0


@pytest.fixture
def upstream(shared_upstream: Nasty, shared_proxy: ProxyProcess) -> Nasty:
    shared_upstream.script = answer_hello
    shared_upstream.seen.clear()
    return shared_upstream


@pytest.fixture
def proxy(shared_proxy: ProxyProcess) -> ProxyProcess:
    assert shared_proxy.process.poll() is None
    return shared_proxy


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., ProxyProcess]]:
    """Starts proxies as `ProxyProcess` does, and ends those that a failed test has left."""
    with ExitStack() as started:
        yield lambda *arguments, **variables: started.enter_context(
            ProxyProcess(*arguments, **variables)
        )
