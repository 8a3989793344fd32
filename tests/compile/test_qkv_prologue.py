"""What the compiled kernel of `qkv_prologue` does: products are rounded, nothing spills, 16 bytes travel at once."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tilewise.ops.qkv_prologue import triton_qkv_prologue
from tilewise.ops.qkv_prologue.problem import Call
from tilewise.testing.offline import compiling_for
from tilewise.testing.qkv_prologue import VARIANTS
from tools.kernel_resources import read_table

pytestmark = pytest.mark.rows("qkv_prologue")


def _ptx(call: Call) -> str:
    with compiling_for(90) as kernels:
        triton_qkv_prologue.forward(call)
    assert len(kernels) == 1
    return kernels[0].asm["ptx"]


def _moves(ptx: str, what: str) -> set[str]:
    return set(re.findall(rf"{what}\.global(?:\.v\d)?\.b\d+", ptx))


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_of_a_rotation_are_rounded(variant: str) -> None:
    """A GPU's rotations are then those of a CPU, bit for bit; the interpreter never fuses a product and a sum."""
    ptx = _ptx(VARIANTS[variant](128, torch.bfloat16))
    assert re.search(r"\bmul(\.rn)?\.f32", ptx)
    assert not re.search(r"\bfma\.", ptx)


@pytest.mark.parametrize("dim", [128, 40])
@pytest.mark.parametrize("variant", ["plain", "norms", "norms neighbours"])
def test_16_bytes_travel_at_once(variant: str, dim: int) -> None:
    """Heads need lie multiples of 16 bytes apart only."""
    assert _moves(_ptx(VARIANTS[variant](dim, torch.bfloat16)), "st") == {"st.global.v4.b32"}


def test_heads_at_odd_places_travel_by_number() -> None:
    call = VARIANTS["norms"](128, torch.bfloat16)
    odd = torch.zeros(call.q.shape[0], 13, 131, dtype=torch.bfloat16)[..., :128]
    table = torch.zeros(200, 65)[:, :64]
    rope = tw.Rope(table, table, torch.zeros(64, dtype=torch.int64))
    write = replace(call.write, k=odd[:, 8:10], v=odd[:, 10:12], rope=rope)
    moves = _moves(_ptx(replace(call, q=odd[:, :8], qk=odd[:, :10], write=write)), "ld")
    assert moves == {"ld.global.b16", "ld.global.b32", "ld.global.b64"}  # numbers, angles, slots and positions


def test_nothing_spills() -> None:
    found = {key: entry for key, entry in read_table()["kernels"].items() if " qkv_prologue " in key}
    assert len(found) == 3 * 3 * len(VARIANTS)
    assert not any(entry["spill"] for entry in found.values())
