"""What the Hopper kernels owe to the order of their instructions, which the assembler may change."""

from __future__ import annotations

import pytest
import torch

from tilewise.ops.attention import gluon_attention
from tilewise.testing.offline import compiling_for, exponentials_in_flight
from tools.kernel_resources import Variant, variants

VARIANTS = [variant for variant in variants() if variant.row == "hopper" and variant.quick]
COLUMNS = 128  # keys of a tile: each of 128 threads has 64 * COLUMNS / 128 probabilities of it


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_exponentials_run_beside_products(variant: Variant) -> None:
    with torch.no_grad(), compiling_for(90) as kernels:
        gluon_attention.forward(variant.call())
    kernel = kernels[-1]
    counts = exponentials_in_flight(kernel)
    assert len(counts) >= 2, "two warpgroups compute at least"
    columns = COLUMNS if variant.head_dim <= 128 else COLUMNS // 2
    assert min(counts) >= 64 * columns // 128
    assert "wgmma.mma_async" in kernel.asm["ptx"]
