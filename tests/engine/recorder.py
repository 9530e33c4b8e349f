"""Stands in for the trace writer: keeps the calls for the tests to look at."""

from __future__ import annotations

from typing import Any


class RecordingWriter:
    """Has `TraceWriter`'s methods; `calls` holds (name, arguments) in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in {"engine", "request", "step", "finish", "event", "mark"}:
            raise AttributeError(name)

        def record(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, {"args": args, **kwargs} if args else kwargs))

        return record

    def of(self, name: str) -> list[dict[str, Any]]:
        """Arguments of all calls of `name`."""
        return [arguments for called, arguments in self.calls if called == name]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.of("event") if event["kind"] == kind]
