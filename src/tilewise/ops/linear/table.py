"""Who runs `linear`: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.linear.problem import Call, gradients, results
from tilewise.ops.operation import Operation, rows_of

_ROWS = rows_of(
    "tilewise.ops.linear",
    "triton_linear",
    lambda call: call.x.device,
    lambda call: call.x.dtype,
    cpu="PyTorch, a matrix-vector product for each row",
    triton="one tile configuration for each weight, whatever the number of rows",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

LINEAR: Operation[Call] = Operation("linear", Call, ROWS, results, gradients, keeps=())
