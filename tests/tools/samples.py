"""A valid benchmark record, for tests to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.records import Record


def sample(**changes: Any) -> Record:
    """A record that the schema accepts, with some keys changed."""
    base = Record(
        run="r", question="attention_forward", problem={"formula": "causal"}, impl="tilewise.triton", p20_ms=1.0,
        p50_ms=2.0, p80_ms=3.0, tflops=100.0, gbps=None, ceiling_tflops=700.0, ceiling_gbps=None,
        error={"metric": "relative", "value": 1e-3}, includes="the call", commit="abc", sources="f00",
        device="NVIDIA H200", driver="1", torch="2", triton="3", method="events", command="c",
        date="2026-01-01T00:00:00Z",
    )  # fmt: skip
    return replace(base, **changes)
