"""SQL over the lake for people: output formats, watching a query, the interactive shell.

All of it runs queries through `capture.sql.query`. Not for judging or confining SQL.
"""
