"""Around the trace ring: who writes, who reads, what its frames say.

The protocol is in `capture.ring` and `capture.reader`.
"""
