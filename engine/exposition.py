"""Metrics as text, in the format that the one who scrapes prefers.

Exemplars exist in OpenMetrics only, so the choice matters. Not for what is measured:
that is `engine.metrics`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The metrics and their content type. OpenMetrics 1.0 when the Accept header `accept` names it
    and does not like plain text more; versions it may name are not looked at."""
    if _weight(accept, "application/openmetrics-text") >= max(_weight(accept, "text/plain"), 1e-3):
        # its other ways of writing names replace the colon of "inferloop:" in samples
        return generate_openmetrics(registry, escaping=ALLOWUTF8), OPENMETRICS
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _weight(accept: str, kind: str) -> float:
    """How much the header wants that media type, 0 (not named) to 1."""
    weights = [0.0]
    for entry in accept.lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name == kind:
            quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
            try:
                weights.append(float(quality))
            except ValueError:
                weights.append(0.0)
    return max(weights)
