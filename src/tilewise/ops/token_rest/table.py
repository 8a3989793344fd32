"""Who adds what stands for tokens that were not read: one row an implementation, with what each needs. Order is
preference.
"""

from __future__ import annotations

import dataclasses

from tilewise.core.dispatch import Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.token_rest.problem import Call, gradients, results

_ROWS = rows_of(
    "tilewise.ops.token_rest",
    "triton_token_rest",
    lambda call: call.o.device,
    lambda call: call.o.dtype,
    cpu="PyTorch",
    triton="one program per block of queries of a row and KV head",
    reference="float64: the specification",
)
ROWS: tuple[Row[Call], ...] = tuple(dataclasses.replace(row, backward=None) for row in _ROWS)

ADD_REST: Operation[Call] = Operation("add_rest", Call, ROWS, results, gradients, keeps=(), outputs=2)
