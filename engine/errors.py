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
