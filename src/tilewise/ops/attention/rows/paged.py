"""The row of the portable kernels for keys in pages."""

from __future__ import annotations

from tilewise.core.dispatch import TRITON, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import ALL_VALUES, GPU, NO_DROPOUT, NO_GRAD, PAGED, UP_TO_FLOAT32

ROW: Row[Call] = Row(
    "triton_paged",
    "tilewise.ops.attention.triton_paged",
    (TRITON, GPU, UP_TO_FLOAT32, PAGED, NO_DROPOUT, NO_GRAD, ALL_VALUES),
    "portable paged kernel: tiles of all requests divided evenly among programs",
    plan="plan",
)
