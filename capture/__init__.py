"""Everything that records what an engine did: ring, collector, trace lake, traffic mirror.

`from capture import open_lake` is the way into the lake from Python; importing the package alone
loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.lake_api import open_lake

__all__ = ["open_lake"]


def __getattr__(name: str) -> Any:
    if name == "open_lake":
        from capture.lake_api import open_lake

        return open_lake
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
