"""What the compiled kernels of `quantize_qkv` do: 16 bytes travel at once, and a rotation is one product a step."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.ops.quantize import triton_quantize
from tilewise.ops.quantize.problem import Call, make_call, results
from tilewise.testing.offline import compiling_for, resources
from tilewise.testing.quantize import VARIANTS

pytestmark = pytest.mark.rows("quantize")


def compiled(call: Call, sm: int = 90) -> list[Any]:
    with compiling_for(sm) as kernels, torch.no_grad():
        triton_quantize.forward(call, results(call))
    return kernels


def moved(kernel: Any, what: str) -> set[str]:
    """The widths in which it reads or writes global memory, what it copies from there among what it reads."""
    found = set(re.findall(rf"{what}\.global[.\w:]*?((?:\.v\d)?\.b\d+)", kernel.asm["ptx"]))
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+),", kernel.asm["ptx"])
    return found | {{16: ".v4.b32", 8: ".v2.b32", 4: ".b32"}[int(size, 16)] for size in copied if what == "ld"}


@pytest.mark.parametrize(
    "variant", ["q thread", "k thread", "k token", "v channel", "k and v", "v block", "q turned", "k turned"]
)
def test_16_bytes_travel_at_once(variant: str) -> None:
    """Of q, k and v; codes are 8 numbers of a thread or more, in one piece."""
    kernels = compiled(VARIANTS[variant](4096, torch.bfloat16)[1])
    for kernel in kernels:
        if kernel.metadata.name != "join_chunks":
            assert ".v4.b32" in moved(kernel, "ld"), kernel.metadata.name
            assert ".b16" not in moved(kernel, "ld"), kernel.metadata.name
    assert ".b8" not in moved(kernels[-1], "st")
    assert moved(kernels[-1], "st") & {".v2.b32", ".v4.b32"}


def test_rows_of_any_16_bytes() -> None:
    """Lengths and strides that no power of 2 divides change nothing."""
    x = torch.zeros(1, 333, 5, 80, dtype=torch.bfloat16)[:, :, :3]
    for side in "qkv":
        kernel = compiled(make_call(side, x, tw.Sage(smooth=()), tw.Dense()))[-1]
        assert ".b16" not in moved(kernel, "ld")
        assert ".b8" not in moved(kernel, "st")


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("variant", ["q rotated", "k rotated"])
@pytest.mark.parametrize("width", [1000, 4096, 65536])
def test_a_rotation_fits(variant: str, width: int, sm: int) -> None:
    found = resources(compiled(VARIANTS[variant](width, torch.bfloat16)[1], sm)[-1])
    assert found.tensor_core > 0
    assert found.spill_bytes <= 32


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("variant", ["q sums", "k sums"])
def test_rows_are_added_up_by_products(variant: str, sm: int) -> None:
    """Those of bfloat16: additions across threads would double what a block's codes take."""
    for dtype in (torch.bfloat16, torch.float16):
        found = resources(compiled(VARIANTS[variant](4096, dtype)[1], sm)[-1])
        assert (found.tensor_core > 0) is (dtype == torch.bfloat16)
        assert found.spill_bytes == 0


def test_a_kernel_that_became_a_trap_would_show() -> None:
    kernel = SimpleNamespace(metadata=SimpleNamespace(name="k", tmem_size=1024))
    with pytest.raises(AssertionError, match="k: 1024 columns of tensor memory"):
        resources(kernel)
