"""The embedded inference engine and its OpenAI-compatible server."""
