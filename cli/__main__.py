"""`python -m cli` is `inferloop`."""

from cli.main import run

run()
