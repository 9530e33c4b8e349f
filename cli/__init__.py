"""The `inferloop` command: argument handling, nothing else."""
