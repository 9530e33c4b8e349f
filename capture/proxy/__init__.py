"""A capture proxy: stands in front of an OpenAI-compatible server, forwards byte for byte, and
writes what passes as trace frames and traffic lines. Two halves that meet in `exchange`: the wire
(address, messages, client, upstream, server) and the capture (everything else), which may fail."""
