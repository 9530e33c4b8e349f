"""Sets a mark in the trace of a running engine: "deploy 7", "config change", the load test's start.

Only an engine writes its ring, so the mark is sent to its server. Not for reading them: they are
the lake's table `marks`.
"""

from __future__ import annotations

from typing import Any

from capture.errors import CaptureError

TIMEOUT_S = 10.0
PATH = "/inferloop/marks"


class MarkError(CaptureError):
    """An engine did not take the mark; the message says which and why."""


def set_mark(url: str, text: str) -> None:
    """Let the engine served at `url` write `text` into its trace. Raises `MarkError`."""
    import httpx

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MarkError("the text is no UTF-8: look at the terminal's encoding") from error
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            answer = client.post(url.rstrip("/") + PATH, json={"text": text})
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        reason = str(error) or type(error).__name__
        raise MarkError(
            f"{url}: no engine answers there ({reason}); --url http://HOST:PORT says where one is"
        ) from error
    if answer.status_code == 404:
        raise MarkError(f"{url}: no engine of inferloop answers there (HTTP 404)")
    if answer.status_code != 200:
        raise MarkError(f"{url}: {_reason(answer)}")


def _reason(answer: Any) -> str:
    """The server's message, or what is left of it when something else answers."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}, and no message"
