"""What holds for every test: it may run on a slow and busy machine, and in CI it is repeatable."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# How long an example takes says nothing there; what it finds does. New examples are looked for by
# hand: what CI finds must lie in the change it judges.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("patient")
