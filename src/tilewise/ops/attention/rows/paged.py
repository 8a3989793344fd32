"""The row of the portable kernels for keys in pages."""

from __future__ import annotations

from tilewise.core.dispatch import TRITON, Need, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import GPU, NO_DROPOUT, NO_GRAD, UP_TO_FLOAT32

ROW: Row[Call] = Row(
    "triton_paged",
    "tilewise.ops.attention.triton_paged",
    (
        TRITON,
        GPU,
        UP_TO_FLOAT32,
        Need("paged keys", lambda c: None if c.pages else "keys that are not paged"),
        NO_DROPOUT,
        NO_GRAD,
    ),
    "all requests' tiles divided evenly among programs, gathered through the block table",
)
