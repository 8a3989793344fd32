"""Who takes queries' largest dimensions: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.query_parts.problem import Call, gradients, results

_ROWS = rows_of(
    "tilewise.ops.query_parts",
    "triton_query_parts",
    lambda call: call.q.device,
    lambda call: call.q.dtype,
    cpu="PyTorch",
    triton="one program per query row and KV head",
    reference="float64: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

PART_QUERIES: Operation[Call] = Operation("part_queries", Call, ROWS, results, gradients, keeps=(), outputs=2)
