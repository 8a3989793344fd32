"""What the compiled kernel of `rope` does: products are rounded, and 16 bytes travel at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

import tilewise as tw
from tilewise.ops.rope import triton_rope
from tilewise.ops.rope.problem import Call, gradients, make_call, results
from tilewise.testing.offline import compiling_for
from tilewise.testing.rope import VARIANTS

pytestmark = pytest.mark.rows("rope")


def _ptx(call: Call, wanted: Sequence[str] = (), incoming: Sequence[torch.Tensor] = ()) -> str:
    with compiling_for(90) as kernels, torch.no_grad():
        if wanted:
            triton_rope.backward(call, {}, incoming, gradients(call, {}, wanted))
        else:
            triton_rope.forward(call, results(call))
    return kernels[-1].asm["ptx"]


def _stores(ptx: str) -> set[str]:
    return set(re.findall(r"st\.global(?:\.v\d)?\.b\d+", ptx))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_rounded_and_16_bytes_travel_at_once(variant: str, dtype: torch.dtype) -> None:
    """A GPU's bits are those of a CPU; the interpreter never fuses a product and a sum."""
    ptx = _ptx(*VARIANTS[variant](4096, dtype)[1:])
    assert re.search(r"\bmul(\.rn)?\.f32", ptx)
    assert not re.search(r"\bfma\.", ptx)
    assert _stores(ptx) == {"st.global.v4.b32"}


def test_strides_need_be_multiples_of_16_bytes_only() -> None:
    table = torch.zeros(64, 20)
    rope = tw.Rope(table, table, torch.zeros(64, dtype=torch.int64), interleaved=True)
    assert _stores(_ptx(make_call(torch.zeros(64, 5, 40, dtype=torch.bfloat16), None, rope))) == {"st.global.v4.b32"}
