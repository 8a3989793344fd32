"""Who computes softmax: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.softmax import composed
from tilewise.ops.softmax.problem import Call, gradients, results

ROWS: tuple[Row[Call], ...] = rows_of(
    "tilewise.ops.softmax",
    "triton_softmax",
    lambda call: call.x.device,
    lambda call: call.in_dtype,
    cpu="PyTorch's softmax with a mask",
    triton="rows in registers, wider ones in chunks read twice",
)

SOFTMAX = Operation(
    "softmax",
    Call,
    ROWS,
    results,
    gradients,
    keeps=("o",),
    composed=composed.forward,
    composed_backward=composed.backward,
)
