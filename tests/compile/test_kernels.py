"""Every kernel compiles for sm_80, sm_90 and sm_100 with no GPU, uses tensor cores, and fits as the table records.

`python -m tools.kernel_resources --write` makes the table (tests/compile/resources.json); here a part of it is
compiled again. Compilers differ, so the exact comparison holds for the Triton that made the table; any other must
compile, use tensor cores, fit, and spill no more than `NEWER_SPILL` bytes where the table has no spill.
"""

from __future__ import annotations

import functools

import pytest
import torch
import triton

import tilewise as tw
from tests.covering import covering_all
from tilewise.ops.attention import triton_attention
from tilewise.ops.attention.problem import make_call
from tilewise.ops.kv_write import triton_kv_write
from tilewise.ops.kv_write.problem import write_call
from tilewise.testing.offline import SHARED_LIMIT, Resources, compiling_for
from tools import same_code
from tools.families import NEIGHBOURS
from tools.kernel_resources import as_entry, read_table
from tools.variants import DTYPES, Variant, variants

TABLE = read_table()
SAME_TRITON = TABLE["triton"] == triton.__version__
MATMUL = (
    "attention_fwd",
    "attention_fwd_sm90",
    "attention_bwd_sm90",
    "attention_bwd_wide_sm90",
    "attention_bwd_queries_sm90",
    "attention_bwd_keys",
    "attention_bwd_queries",
    "attention_split",
    "linear_fwd",
    "score_tokens_sm90",
)
REGISTERS, SPILL, SHARED = 16, 32, 1024  # slack: how much more than the table an unrelated change may cost
UNSTEADY = 128  # bytes by which the assembler's spills of a kernel full to the last register differ from run to run
NEWER_SPILL = 1024
FORMULAS_OF = ("triton", "hopper", "hopper_codes", "hopper_decode")  # rows that compile another kernel for each


def quick(sm: int) -> list[Variant]:
    """What is compiled: what holds each kernel, each dtype and head dimension of a row, and with the table's Triton on
    sm_90 each formula of the tiled kernels.
    """
    found = [variant for variant in variants() if variant.quick and variant.sm == sm]
    return [found[n] for n in covering_all([parts_of(variant) for variant in found])]


def parts_of(variant: Variant) -> set[str]:
    """The names of a variant's kernels, by the table, its row with its dtype, head dimension and formula."""
    kernels = {key.partition(": ")[2] for key in TABLE["kernels"] if key.startswith(f"{variant}:")}
    parts = {*kernels, f"{variant.row} {variant.dtype}", f"{variant.row} d{variant.head_dim}"}
    if SAME_TRITON and variant.sm == 90 and variant.row in FORMULAS_OF:
        parts.add(f"{variant.row} {variant.formula}")
    return parts


def check(variant: Variant) -> None:
    launches = variant.launches()
    if SAME_TRITON and str(variant) in (code := _of_todays_sources()):
        assert same_code.digests(launches) == code[str(variant)], (
            f"{variant} compiles to other instructions, or is launched in another way, than code.json says: "
            "run `python -m tools.kernel_resources --changed --write`"
        )
    for name, found in variant.named(launches).items():
        where = f"{variant}: {name}"
        assert found.shared_bytes <= SHARED_LIMIT[variant.sm], f"{where}: {found.shared_bytes} bytes of shared memory"
        if name in MATMUL and variant.dtype != "fp32":
            assert found.tensor_core > 0, f"{where}: no tensor-core instruction"
        known = TABLE["kernels"].get(where)
        assert known is not None, f"{where} is not in the table: run `python -m tools.kernel_resources --write`"
        compare(where, found, known)


def compare(where: str, found: Resources, known: dict[str, int]) -> None:
    """Not much worse than the table says."""
    got = as_entry(found)
    spill = UNSTEADY if where.endswith("_sm90") else SPILL
    slack = {"registers": REGISTERS, "spill": spill, "shared": SHARED} if SAME_TRITON else {"spill": NEWER_SPILL}
    for key, more in slack.items():
        assert got[key] <= known[key] + more, f"{where}: {key} {got[key]}, table {known[key]} (slack {more})"


@functools.cache
def _of_todays_sources() -> dict[str, str]:
    """Digests by variant in code.json, of families whose sources are those that it was made of."""
    table = same_code.read_table()
    stale = {str(variant) for family in same_code.stale(table) for variant in same_code.compiled_by(family)}
    return {name: digests for name, digests in table["variants"].items() if name not in stale}


# A class each, so that pytest-xdist may give them to different processes.
class TestSm80:
    @pytest.mark.parametrize("variant", quick(80), ids=str)
    def test_kernels_fit(self, variant: Variant) -> None:
        check(variant)


class TestSm90:
    @pytest.mark.parametrize("variant", [v for v in quick(90) if "hopper" not in v.row], ids=str)
    def test_kernels_fit(self, variant: Variant) -> None:
        check(variant)


class TestHopper:
    @pytest.mark.parametrize("variant", [v for v in quick(90) if "hopper" in v.row], ids=str)
    def test_kernels_fit(self, variant: Variant) -> None:
        check(variant)


class TestSm100:
    @pytest.mark.parametrize("variant", quick(100), ids=str)
    def test_kernels_fit(self, variant: Variant) -> None:
        check(variant)


class TestTable:
    def test_it_holds_every_variant(self) -> None:
        held = {key.partition(":")[0] for key in TABLE["kernels"]}
        assert held == {str(variant) for variant in variants()}

    def test_the_quick_variants_reach_every_dtype_width_and_formula(self) -> None:
        for sm in SHARED_LIMIT:
            chosen = [variant for variant in variants() if variant.quick and variant.sm == sm]
            assert {v.dtype for v in chosen} == set(DTYPES)
            assert {v.head_dim for v in chosen if v.row not in NEIGHBOURS} == {64, 128, 256, 512}
            rows = {"triton", "triton_codes", "triton_decode", "triton_paged", "merge", "kv_write", "qkv_prologue"}
            assert {v.row for v in chosen} == rows | (
                {"hopper", "hopper_codes", "hopper_decode", "hopper_mixed", *NEIGHBOURS} if sm == 90 else set()
            )

    def test_every_16_bit_kernel_uses_tensor_cores_and_fits(self) -> None:
        for key, entry in TABLE["kernels"].items():
            variant, _, name = key.partition(": ")
            sm = int(variant.split()[0].removeprefix("sm_"))
            assert entry["shared"] <= SHARED_LIMIT[sm], key
            if name in MATMUL and "fp32" not in variant:
                assert entry["tensor_core"] > 0, key

    def test_a_worse_kernel_would_show(self) -> None:
        known = {"registers": 100, "spill": 0, "shared": 1000, "tensor_core": 4}
        compare("same", Resources("k", 100, 0, 1000, 4), known)
        with pytest.raises(AssertionError, match="spill"):
            compare("spills", Resources("k", 100, max(SPILL, NEWER_SPILL) + 1, 1000, 4), known)


class TestInstructions:
    @pytest.mark.rows("triton")
    def test_minimum_and_maximum_of_a_score_keep_nan(self) -> None:
        """PyTorch's do; the interpreter's NumPy does whatever the kernel says, so the code itself is looked at."""
        q = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16)
        call = make_call(q, q, q, score=lambda s, b, h, i, j: s.clamp(-1.0, 1.0))
        with compiling_for(90) as kernels:
            triton_attention.forward(call)
        ptx = kernels[-1].asm["ptx"]
        assert "min.NaN.f32" in ptx
        assert "max.NaN.f32" in ptx

    @pytest.mark.rows("triton")
    def test_rows_of_captured_tensors(self) -> None:
        q = torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
        blocks, near = torch.zeros(2, 4, 2, dtype=torch.int64), torch.zeros(256, 2)
        mask = lambda b, h, i, j: (blocks[h, i // 64] == (j // 64).unsqueeze(-1)).any(-1)  # noqa: E731
        call = make_call(q, q, q, mask=mask, score=lambda s, b, h, i, j: s + (near[i] * near[j]).sum(-1))
        with compiling_for(90) as kernels:
            triton_attention.forward(call)
        found = kernels.resources()[-1]
        assert found.tensor_core > 0
        assert found.shared_bytes <= SHARED_LIMIT[90]

    @pytest.mark.rows("kv_write")
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_products_of_a_rotation_are_rounded(self, interleaved: bool) -> None:
        """A GPU's keys are then those of a CPU, bit for bit; the interpreter never fuses a product and a sum."""
        x, pages = torch.zeros(64, 2, 128), torch.zeros(8, 16, 2, 128)
        rope = tw.Rope(torch.zeros(64, 64), torch.zeros(64, 64), torch.arange(64), interleaved)
        with compiling_for(90) as kernels:
            triton_kv_write.write(write_call(x, x, pages, pages.clone(), torch.arange(64), rope))
        ptx = kernels[-1].asm["ptx"]
        assert "mul.rn.f32" in ptx
        assert "fma" not in ptx
