"""A user's SQL: judged, then run in a process that is shut in."""
