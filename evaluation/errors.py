"""Errors of the judging side: labels, gate, feedback."""

from __future__ import annotations


class EvaluationError(Exception):
    """Base of all errors raised here on purpose; the message is meant for the user."""

    exit_code = 1


class LabelError(EvaluationError):
    """A verdict that cannot be taken: unknown token, unknown word, nothing to undo."""


class GateError(EvaluationError):
    """The gate could not be evaluated: its policy is not valid or the run does not exist.

    Exit code 3, so that CI never reads a broken gate as a failed release.
    """

    exit_code = 3


class FeedbackError(EvaluationError):
    """The feedback policy was not published; the message says why and what to do."""
