"""The check that operands of tensor cores are no wider than what they multiply, on lines of Triton's GPU code."""

from __future__ import annotations

import pytest

from tilewise.ops.triton_operands import too_wide

LINE = "tensor<{}xf16, #ttg.dot_op<{{opIdx = {}, parent = #mma, kWidth = {}}}>>"


@pytest.mark.parametrize(
    ("dims", "operand", "width", "found"),
    [
        ("16x16", 0, 8, 1),  # a wrong gradient that was found in use
        ("16x512", 1, 8, 1),
        ("16x16", 0, 4, 0),
        ("16x32", 0, 8, 0),
        ("32x16", 1, 8, 0),
        ("2x16x16", 0, 8, 1),
    ],
)
def test_lanes_hold_no_more_than_the_inner_dimension(dims: str, operand: int, width: int, found: int) -> None:
    line = LINE.format(dims, operand, width)
    assert too_wide(f"%3 = tt.dot %1 : {line} -> tensor<16x16xf32, #mma>") == [line] * found
