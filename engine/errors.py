"""Errors of the engine. Those raised for a request carry the HTTP status they become."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors the engine raises on purpose; the message is meant for the user."""

    exit_code = 1


class ModelFileError(EngineError):
    """The model file is missing, truncated, damaged or of a kind that is not supported."""


class TemplateError(EngineError):
    """The model's chat template refused or could not render the messages."""


class RunnerError(EngineError):
    """The device failed while running a step."""


class RequestError(EngineError):
    """One request is refused or has failed; nothing else is affected.

    `status` is the HTTP status, `kind` and `code` are the type and code of OpenAI's error shape;
    `param` names the field or header at fault.
    """

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLong(RequestError):
    """Prompt and answer together exceed the context or the whole KV cache."""

    code = "context_length_exceeded"


class QueueFull(RequestError):
    """The waiting queue is at its bound; worth another try after `retry_after_s` seconds."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAborted(RequestError):
    """The client gave up, or the engine was stopped, before the answer was complete."""

    status = 499
    kind = "server_error"
    code = "aborted"


class RequestFailed(RequestError):
    """The step that computed this request failed; other requests go on."""

    status = 500
    kind = "server_error"
    code = "step_failed"


class EngineUnavailable(RequestError):
    """The engine is not running, is draining, or has failed for good."""

    status = 503
    kind = "server_error"
    code = "engine_unavailable"
