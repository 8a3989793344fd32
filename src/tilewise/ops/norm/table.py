"""Who can norm rows: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

from tilewise.ops.norm import composed
from tilewise.ops.norm.problem import Call, gradients, outputs, results
from tilewise.ops.operation import Operation, rows_of

ROWS = rows_of(
    "tilewise.ops.norm",
    "triton_norm",
    lambda call: call.x.device,
    lambda call: call.x.dtype,
    cpu="statistics, then rows, in PyTorch",
    triton="rows read once and kept in registers, wider ones in chunks; a fixed grid sums weight gradients",
)

NORM: Operation[Call] = Operation(
    "norm",
    Call,
    ROWS,
    results=results,
    gradients=gradients,
    keeps=("x", "weight", "bias", "stats"),
    outputs=outputs,
    alike={"residual": "x"},
    composed=composed.forward,
)
