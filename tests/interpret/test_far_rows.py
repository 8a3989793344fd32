"""Rows further apart than 32 bits count: no Triton kernel multiplies a place and its stride in fewer."""

from __future__ import annotations

import pytest

from tests.far import CASES, check


@pytest.mark.parametrize(("name", "tensor", "axis"), CASES)
def test_bits_are_those_of_near_rows(name: str, tensor: str, axis: int) -> None:
    check(name, tensor, axis, "cpu", "triton", 16)
