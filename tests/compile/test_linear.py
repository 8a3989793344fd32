"""What the compiled kernel of `linear` does: one binary for each weight, so that a row is summed in one order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.interpret.test_twins import broken_copy
from tilewise.ops.linear import triton_linear
from tilewise.ops.linear.problem import make_call, results
from tilewise.testing.offline import compiling_for

pytestmark = pytest.mark.rows("linear")
ROWS = (1, 2, 16, 17, 64, 1000)


def binaries(sm: int, out_features: int, in_features: int, dtype: torch.dtype) -> set[bytes]:
    """Those of x with different numbers of rows, near each other and apart."""
    weight, bias = torch.zeros(out_features, in_features, dtype=dtype), torch.zeros(out_features, dtype=dtype)
    with compiling_for(sm) as kernels:
        for rows in ROWS:
            x = torch.zeros(rows, in_features, dtype=dtype)
            for lying in (x, F.pad(x, (0, 24)).narrow(1, 8, in_features), F.pad(x, (0, 7)).narrow(1, 1, in_features)):
                call = make_call(lying, weight, bias, None)
                triton_linear.forward(call, results(call))
    assert len(kernels) == 3 * len(ROWS)
    return {kernel.asm["cubin"] for kernel in kernels}


@pytest.mark.parametrize("sizes", [(1024, 1024), (16384, 1000), (100, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_every_number_of_rows_runs_one_binary(sm: int, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    assert len(binaries(sm, *sizes, dtype)) == 1


@pytest.mark.parametrize(("old", "new"), [
    ('"stride_w", "rows"', '"stride_w"'),
    (" and x.data_ptr() % _BYTES == 0", ""),
    ("(vector, _ROWS, block_n,", "(vector, 64 if rows > 16 else 16, block_n,"),
])  # fmt: skip
def test_a_kernel_that_depends_on_rows_is_caught(old: str, new: str, tmp_path: Path, monkeypatch) -> None:
    copy = broken_copy(triton_linear, old, new, tmp_path)
    monkeypatch.setattr(triton_linear, "forward", copy.forward)
    assert len(binaries(90, 1024, 1000, torch.bfloat16)) > 1


def test_products_of_float32_are_not_tf32() -> None:
    with compiling_for(90) as kernels:
        call = make_call(torch.zeros(64, 512), torch.zeros(64, 512), None, None)
        triton_linear.forward(call, results(call))
    assert "fma.rn.f32" in kernels[-1].asm["ptx"]
    assert "mma" not in kernels[-1].asm["ptx"].replace("wgmma.fence", "")
