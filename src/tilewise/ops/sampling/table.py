"""Who samples tokens: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.sampling.problem import Call, gradients, results

_ROWS = rows_of(
    "tilewise.ops.sampling",
    "triton_sampling",
    lambda call: call.logits.device,
    lambda call: call.logits.dtype,
    cpu="some rows at a time in PyTorch, noise only where it can matter",
    triton="parts of a row in parallel; thresholds of top-k and top-p by search, without a sort",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

SAMPLE: Operation[Call] = Operation(
    "sample", Call, ROWS, results, gradients, keeps=(), outputs=lambda call: 3 if call.top < 0 else 5
)
