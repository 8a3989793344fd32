"""The check that barriers' memory is nothing else, on PTX written by hand and on a kernel."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops.attention.problem import make_call
from tilewise.testing.barriers import reused_barriers
from tilewise.testing.offline import compile_call, compiling_for, resources

PTX = """
	mov.b32 	%r9, global_smem;
	add.s32 	%r1, %r9, 1024;
	@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
	@%p1 mbarrier.init.shared::cta.b64 [global_smem+1032], 1;
	{access}
"""


@pytest.mark.parametrize(
    ("access", "found"),
    [
        ("@%p2 st.shared.b32 [ %r1 + 0 ], %r3;", [1024]),
        ("ld.shared.b32 	%r4, [global_smem+1028];", [1024]),
        ("ld.shared.v2.b32 	{%r4, %r5}, [%r9+1032];", [1032]),
        ("add.s32 	%r7, %r1, 4;\n	st.shared.b32 [%r7], %r3;", [1024]),
        ("ld.shared.b32 	%r4, [global_smem+1040];", []),
        ("mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;", []),
        ("st.shared.b32 [%r8], %r3;", []),  # who knows where
        ("@%p1 mbarrier.inval.shared::cta.b64 [%r1];\n	st.shared.b32 [%r1], %r3;", []),
    ],
)
def test_other_uses_of_a_barrier_are_found(access: str, found: list[int]) -> None:
    assert reused_barriers(PTX.replace("{access}", access)) == found


@gluon.jit
def _taken(COUNT, OUT, WAITS: gl.constexpr):
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    first = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(first, count=1)
    if WAITS:
        mbarrier.arrive(first)
    gl.store(OUT, gl.atomic_add(COUNT, 1))
    if WAITS:
        mbarrier.wait(first, 0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_barrier_that_nobody_uses_is_found(waits: bool) -> None:
    count, out = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    with compiling_for(90) as kernels:
        _taken[(1,)](count, out, waits)
    if waits:
        resources(kernels[0])
    else:
        with pytest.raises(AssertionError, match="barrier"):
            resources(kernels[0])


@pytest.mark.parametrize("dim", [64, 128])
def test_short_sequences_use_all_barriers(dim: int) -> None:
    """What is added up between programs, and how, depends on how long sequences are: other variants are longer."""
    q, k, v = (torch.zeros(1, 256, 2, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    assert compile_call(make_call(q, k, v), 90, "hopper")  # which looks for such barriers
