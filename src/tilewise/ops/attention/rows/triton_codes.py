"""The row of the portable kernel in few bits."""

from __future__ import annotations

from tilewise.core.dispatch import TRITON, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import ANY_BATCH, GPU, NO_DROPOUT, SCHEME, UP_TO_FLOAT32

ROW: Row[Call] = Row(
    "triton_codes",
    "tilewise.ops.attention.triton_codes",
    (SCHEME, NO_DROPOUT, ANY_BATCH, TRITON, GPU, UP_TO_FLOAT32),
    "portable quantized kernel: products in INT8 or FP8, in float16 where the GPU has no FP8",
    backward="backward",
)
