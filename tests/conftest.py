"""What holds for every test: it may run on a slow and busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says nothing there; what it finds does.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
