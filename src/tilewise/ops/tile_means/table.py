"""Who computes means of tiles: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.tile_means import composed
from tilewise.ops.tile_means.problem import Call, gradients, names, results

ROWS: tuple[Row[Call], ...] = rows_of(
    "tilewise.ops.tile_means",
    "triton_tile_means",
    lambda call: call.x.device,
    lambda call: call.dtype,
    cpu="PyTorch, one sequence at a time",
    triton="one program per tile and head",
    reference="float64, tile by tile: the specification",
)

TILE_MEANS: Operation[Call] = Operation(
    "tile_means",
    Call,
    ROWS,
    results,
    gradients,
    keeps=("x", "cu_seqlens", "mean"),
    outputs=lambda call: len(names(call)),
    composed=composed.forward,
)
