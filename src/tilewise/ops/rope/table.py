"""Who turns queries and keys: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.rope import composed
from tilewise.ops.rope.problem import Call, gradients, results

ROWS: tuple[Row[Call], ...] = rows_of(
    "tilewise.ops.rope",
    "triton_rope",
    lambda call: call.cos.device,
    lambda call: call.dtype,
    cpu="PyTorch, all tokens at once",
    triton="one launch for queries and keys, one program per block of tokens and heads",
    reference="pair by pair, rounded as `Rope` says: the specification",
)

ROPE = Operation(
    "rope",
    Call,
    ROWS,
    results,
    gradients,
    keeps=("cos", "sin", "positions"),
    outputs=2,
    composed=composed.forward,
    composed_backward=composed.backward,
)
