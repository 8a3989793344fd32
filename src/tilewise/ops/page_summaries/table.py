"""Who summarizes pages: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.page_summaries.problem import Call, gradients, results

_ROWS = rows_of(
    "tilewise.ops.page_summaries",
    "triton_page_summaries",
    lambda call: call.k.device,
    lambda call: call.k.dtype,
    cpu="PyTorch, all pages at once",
    triton="one program per page and head",
    reference="float64, page by page: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

SUMMARIZE: Operation[Call] = Operation(
    "summarize_pages", Call, ROWS, results, gradients, keeps=(), outputs=lambda call: 6 if call.bits else 5
)
