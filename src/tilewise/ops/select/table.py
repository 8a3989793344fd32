"""Who takes tiles by a prediction: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Need, Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.select.problem import LONGEST, Call, gradients, results


def _too_long(call: Call) -> str | None:
    tiles = call.scores.shape[-1]
    return None if tiles <= LONGEST else f"{tiles}"


_ROWS = rows_of(
    "tilewise.ops.select",
    "triton_select",
    lambda call: call.scores.device,
    lambda call: call.scores.dtype,
    cpu="PyTorch, rows sorted",
    triton="rows in registers, the threshold found bit by bit",
    needs=(Need(f"rows of at most {LONGEST} tiles of keys (choose a larger block)", _too_long),),
    reference="row by row, tile by tile: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

TAKE: Operation[Call] = Operation("take_tiles", Call, ROWS, results, gradients, keeps=())
