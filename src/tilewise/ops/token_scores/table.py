"""Who predicts scores of tokens: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.token_scores.problem import Call, gradients, results

_ROWS = rows_of(
    "tilewise.ops.token_scores",
    "triton_token_scores",
    lambda call: call.q.device,
    lambda call: call.least.dtype,
    cpu="one row of queries after another in PyTorch",
    triton="a program for some pages of a head",
    reference="float64, token by token: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

SCORE_TOKENS: Operation[Call] = Operation("score_tokens", Call, ROWS, results, gradients, keeps=(), outputs=4)
