"""Who chooses tokens: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.token_choice.problem import Call, gradients, results

_ROWS = rows_of(
    "tilewise.ops.token_choice",
    "triton_token_choice",
    lambda call: call.total.device,
    lambda call: call.total.dtype,
    cpu="PyTorch, one row of queries at a time",
    triton="top-k: one program finds the threshold of a row, others write what is above it",
    reference="float64, token by token: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

CHOOSE_TOKENS: Operation[Call] = Operation("choose_tokens", Call, ROWS, results, gradients, keeps=(), outputs=5)
