"""Who chooses pages: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Need, Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.page_choice.problem import LONGEST, Call, gradients, results


def _too_long(call: Call) -> str | None:
    pages = call.table.shape[1]
    return None if pages <= LONGEST else f"{pages}"


_ROWS = rows_of(
    "tilewise.ops.page_choice",
    "triton_page_choice",
    lambda call: call.q.device,
    lambda call: call.q.dtype,
    cpu="PyTorch, one row of queries at a time",
    triton="one program per block of pages and head for the scores, then top-k by row",
    needs=(Need(f"tables of at most {LONGEST} pages", _too_long),),
    reference="float64, page by page: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

CHOOSE_PAGES: Operation[Call] = Operation("choose_pages", Call, ROWS, results, gradients, keeps=(), outputs=4)
