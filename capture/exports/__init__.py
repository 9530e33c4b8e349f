"""The lake in other tools' formats: Perfetto traces, OpenTelemetry spans and metrics.

Reads what the collector has committed; writes nothing to the lake. Not for Prometheus: that is the
engine's `/metrics`.
"""
