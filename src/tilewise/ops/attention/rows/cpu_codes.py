"""The row of the CPU in few bits."""

from __future__ import annotations

from tilewise.core.dispatch import Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import ANY_BATCH, CPU, NO_DROPOUT, SCHEME

ROW: Row[Call] = Row(
    "cpu_codes",
    "tilewise.ops.attention.cpu_codes",
    (SCHEME, NO_DROPOUT, ANY_BATCH, CPU),
    "PyTorch, emulates quantized attention",
    backward="backward",
)
