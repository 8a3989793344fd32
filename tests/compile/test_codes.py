"""What the kernels over codes multiply, and what Hopper's owes to the order of its instructions, which may change."""

from __future__ import annotations

import pytest
import triton

from tilewise.ops.attention import gluon_codes, gluon_sm90_codes, triton_codes
from tilewise.ops.attention import gluon_sm90_half_codes as halves
from tilewise.ops.attention import gluon_sm90_weight_codes as weights
from tilewise.testing import weight_codes as model
from tilewise.testing.offline import compiling_for, exponentials_in_flight, spilled_in_loops
from tools.kernel_resources import read_table
from tools.variants import Variant, variants

pytestmark = pytest.mark.rows("hopper_codes", "triton_codes")
VARIANTS = [variant for variant in variants() if variant.row == "hopper_codes"]
# which looks at all scores of a tile before it takes one exponential
IN_TURNS = "sage2 left out"
OF_A_FORMULA = "fp8 blocks"  # which fills the registers beside tiles that it cuts
WIDE = 256  # head dimension, whose tiles come one after another
OVERLAPPED = [v for v in VARIANTS if v.quick and v.formula != IN_TURNS and v.head_dim < WIDE]
OF_KEPT = ("sage2", "sage2 causal", "sage2 packed", "int8 blocks")  # which keep the upper bits of scores
FEW = 8  # registers of a loop that a wide one may spill
A_PAIR = 2  # that one beside tiles that a formula cuts may
OF_THREADS = 4  # that one over integers may whose scales are those of threads
A_THREADS = 64  # weights of a tile that each thread has
PAIRS_LEFT = 8  # of what is kept of them, two in a register, that the assembler may put behind the products
PINNED = 16  # of them, where nothing sums them: two of every eight
SAME_TRITON = read_table()["triton"] == triton.__version__


def test_the_model_of_weights_has_the_kernels_numbers() -> None:
    kernel = (weights.CENTRE, weights.LARGEST_CODE, gluon_sm90_codes.FALL.value)
    assert kernel == (model.CENTRE, model.LARGEST_CODE, model.FALL)
    of_kept = (halves.UNIT, halves.MOST_CODES, halves.LEAST_CODES)
    assert of_kept == (model.UNIT, model.MOST_CODES, model.LEAST_CODES)


@pytest.mark.parametrize("variant", OVERLAPPED, ids=str)
def test_exponentials_run_beside_products(variant: Variant) -> None:
    """All of them; where weights are not summed before they are codes, at least what is pinned. These are codes of
    exponents, by an addition and a multiplication.
    """
    call = variant.call()
    with compiling_for(90) as kernels:
        gluon_codes.forward(call)
    sums = variant.formula == "sage2 sums"
    one, other = ("MUFU.EX2", "FFMA.SAT") if sums else ("FFMA.SAT", "MUFU.EX2")
    least = A_THREADS if sums or SAME_TRITON else PINNED
    beside = [count for count in exponentials_in_flight(kernels[-1], one) if count >= least]
    assert len(beside) >= 2, "two warpgroups compute"
    assert max(exponentials_in_flight(kernels[-1], other)) <= 4, "those of rows"
    if variant.formula in OF_KEPT:
        beside = [count for count in exponentials_in_flight(kernels[-1], "VIADDMNMX.S16x2") if count]
        assert len(beside) == 2
        assert min(beside) >= (A_THREADS // 2 - PAIRS_LEFT if SAME_TRITON else PINNED // 2)
    ptx = kernels[-1].asm["ptx"]
    assert ("s32.s8.s8" in ptx) is variant.formula.startswith(("sage2", "int8"))
    assert "f32.e4m3.e4m3" in ptx


@pytest.mark.parametrize(("sm", "of_int8", "of_fp8"), [(80, "s32.s8.s8.s32", None), (90, "s32.s8.s8", "e4m3.e4m3")])
def test_the_portable_kernel_multiplies_bytes(sm: int, of_int8: str, of_fp8: str | None) -> None:
    call = Variant(sm, "triton_codes", "bf16", 128, "sage2 causal").call()
    with compiling_for(sm) as kernels:
        triton_codes.forward(call)
    ptx = kernels[-1].asm["ptx"]
    assert of_int8 in ptx
    assert "e4m3x2" in ptx if of_fp8 else "f16.f16" in ptx
    assert of_fp8 is None or of_fp8 in ptx


@pytest.mark.skipif(not SAME_TRITON, reason="what spills is up to Triton's assembler")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_loops_over_tiles_spill_nothing_or_little(variant: Variant) -> None:
    call = variant.call()
    with compiling_for(90) as kernels:
        gluon_codes.forward(call)
    spilled = spilled_in_loops(kernels[-1])
    assert len(spilled) >= 2, "two warpgroups compute"
    if variant.head_dim == WIDE:
        assert max(spilled) <= FEW
        return
    if variant.formula == OF_A_FORMULA:
        assert len(spilled) == 4, "tiles that are cut have a loop of their own"
        assert max(spilled) <= A_PAIR
        return
    assert max(spilled) <= (OF_THREADS if variant.formula in OF_KEPT and variant.head_dim == 128 else 0)
