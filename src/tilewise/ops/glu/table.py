"""Who computes gated linear units: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

from tilewise.core.dispatch import Row
from tilewise.ops.glu import composed
from tilewise.ops.glu.problem import Call, gradients, results
from tilewise.ops.operation import Operation, rows_of

ROWS: tuple[Row[Call], ...] = rows_of(
    "tilewise.ops.glu",
    "triton_glu",
    lambda call: call.gate.device,
    lambda call: call.gate.dtype,
    cpu="PyTorch's activation, times up",
    triton="one pass; the backward recomputes the activation",
)

GLU = Operation("glu", Call, ROWS, results, gradients, keeps=("gate", "up"), composed=composed.forward)
