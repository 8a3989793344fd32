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
    cpu="PyTorch: statistics, then rows",
    triton="rows read once into registers, wider ones in chunks; weight gradients summed by a fixed grid",
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
