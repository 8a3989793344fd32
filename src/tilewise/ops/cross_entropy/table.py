"""Who computes cross entropy, of logits and of a linear layer: one row an implementation. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.cross_entropy import composed
from tilewise.ops.cross_entropy.problem import Call, LinearCall, gradients, linear_results, results
from tilewise.ops.operation import Operation, rows_of

ROWS: tuple[Row[Call], ...] = rows_of(
    "tilewise.ops.cross_entropy",
    "triton_cross_entropy",
    lambda call: call.target.device,
    lambda call: (call.x if isinstance(call, LinearCall) else call.logits).dtype,
    cpu="PyTorch, a chunk of tokens at a time under a linear layer",
    triton="two passes over logits, loss then gradient; under a linear layer the gradient overwrites them",
)
_LINEAR_ROWS: tuple[Row[LinearCall], ...] = tuple(
    dataclasses.replace(row, forward="linear_forward", backward="linear_backward")  # type: ignore[misc]
    for row in ROWS
)

CROSS_ENTROPY = Operation(
    "cross_entropy",
    Call,
    ROWS,
    results,
    gradients,
    keeps=("logits", "target", "top", "log_sum", "scale"),
    composed=composed.forward,
)
LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy",
    LinearCall,
    _LINEAR_ROWS,
    linear_results,
    gradients,
    keeps=("x", "weight", "bias", "target", "top", "log_sum", "scale", "dx", "dweight", "dbias"),
    composed=composed.linear_forward,
)
