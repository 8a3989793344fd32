"""How the report shows the questions about the engine: the names of their rows."""

from __future__ import annotations

from typing import Any

QUESTIONS = (
    "engine_throughput", "engine_first_token", "engine_between_tokens", "engine_step", "engine_prefix", "engine_pages",
    "engine_equality",
)  # fmt: skip


def label(problem: dict[str, Any]) -> str:
    """A row's name: the model, and what it is asked."""
    return f"{problem['model']}, {problem['workload']}"
