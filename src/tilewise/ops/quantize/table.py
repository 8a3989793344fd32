"""Who encodes queries, keys and values: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.quantize.problem import Call, gradients, names, results

_ROWS = rows_of(
    "tilewise.ops.quantize",
    "triton_quantize",
    lambda call: call.x.device,
    lambda call: call.x.dtype,
    cpu="PyTorch, one sequence at a time",
    triton="one program per block and head, after a pass of statistics where means or scales span a sequence",
    reference="means and rotations in float64, block by block: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

QUANTIZE: Operation[Call] = Operation(
    "quantize", Call, ROWS, results, gradients, keeps=(), outputs=lambda call: len(names(call))
)
