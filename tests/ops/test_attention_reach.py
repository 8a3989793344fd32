"""What kernels with offsets of 32 bits are not given: pools whose heads or places in a page lie far apart."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.core.dispatch import Need, Row
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.attention.rows import decode, hopper, needs
from tilewise.testing.inputs import untouched

FAR = 2**30  # elements, three of which 32 bits do not hold


def call_over(strides: tuple[int, ...]) -> Call:
    """Over two pages of three tokens and three heads, of a pool of which nothing is touched."""
    pool = untouched(2**31 + 2**12, torch.bfloat16).as_strided((2, 3, 3, 64), strides)
    layout = tw.Paged(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
    return make_call(torch.randn(1, 1, 3, 64, dtype=torch.bfloat16), pool, pool, layout=layout)


@pytest.mark.parametrize(
    ("row", "need", "far", "near"),
    [
        (decode.ROW, needs.NEAR_TOKENS, (192, FAR, 64, 1), (576, 192, 64, 1)),
        (hopper.ROW, needs.NEAR_TOKENS, (192, FAR, 64, 1), (576, 192, 64, 1)),
        (hopper.ROW, needs.NEAR_HEADS, (192, 64, FAR, 1), (576, 64, 192, 1)),
    ],
)  # fmt: skip
def test_pools_out_of_reach(row: Row[Call], need: Need[Call], far: tuple[int, ...], near: tuple[int, ...]) -> None:
    assert need in row.needs
    said = need.unmet(call_over(far))
    assert said is not None
    assert str(2 * FAR) in said
    assert need.unmet(call_over(near)) is None
