"""What the collector is made of: rows, commits, finished rings, upkeep, retention.

It starts in `capture.collector`.
"""
