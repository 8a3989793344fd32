"""The repository's own tools, run as `python -m tools.<name>` from its root."""
