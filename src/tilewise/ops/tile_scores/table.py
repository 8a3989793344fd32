"""Who scores pairs of tiles: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.tile_scores.problem import Call, gradients, results

_ROWS = rows_of(
    "tilewise.ops.tile_scores",
    "triton_tile_scores",
    lambda call: call.q_sums.device,
    lambda call: call.q_sums.dtype,
    cpu="PyTorch, all tiles at once",
    triton="one program per block of query tiles, block of key tiles and head",
    reference="float64, tile by tile: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

TILE_SCORES: Operation[Call] = Operation(
    "tile_scores", Call, ROWS, results, gradients, keeps=(), outputs=lambda call: 1 if call.q_units is None else 3
)
