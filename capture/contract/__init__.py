"""The traffic's data contract: its JSON Schema, what may change in it, which files keep it."""
