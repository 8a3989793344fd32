"""`attention(quantize=)` on a GPU: results of the codes, gradients, repetition, replay, long rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.ops.attention import triton_codes
from tilewise.quant import Quantized
from tilewise.quant.schemes import Scheme
from tilewise.testing import attention_codes as cases
from tilewise.testing.attention_codes import CASES, FP8_VALUES, CodedCase
from tilewise.testing.attention_select import check_left_out
from tilewise.testing.case import Case
from tilewise.testing.graphs import captured
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.weight_codes import by_exponents, hopper_weights, rounded_weights

ROW, PORTABLE = ROWS = ("hopper_codes", "triton_codes")
BY_NAME = {case.name: case for case in CASES}
_CENTRED = tw.Sage(smooth=("k", "v"))
_BLOCKS = tw.Sage(q_scale="block", k_scale="block", v_scale="block", smooth=())


def _tiles(device: str) -> dict[str, Any]:
    """Tiles that no mask cuts; one head has queries that see nothing."""
    seen = torch.rand(4, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.4
    seen[0, 5] = False
    return {"mask": tw.blocks(seen.to(device), 128)}


LARGE = [
    CodedCase("large", tw.Sage2(), lengths=((900, 2100),), heads=(4, 2), dim=128, dim_v=128),
    CodedCase("large_causal", tw.Sage2(), lambda device: {"mask": tw.causal}, ((1500, 1500),), (4, 4), 128, 128),
    CodedCase("large_fp8", tw.Sage("fp8", rotate="hadamard"), lambda device: {"mask": tw.causal}, ((2000, 2000),),
              (4, 1), 64, 64),
    CodedCase("large_tiles", tw.Sage2(), _tiles, ((1500, 1500),), (4, 2), 128, 128),
    CodedCase("large_tiles_blocks", tw.FP8("block", "block", "block"), _tiles, ((1500, 1500),), (4, 2), 128, 128),
    CodedCase("large_tiles_int8_blocks", _BLOCKS, _tiles, ((1500, 1500),), (4, 2), 128, 128),
    CodedCase("large_int8_blocks", _BLOCKS, lambda device: {"mask": tw.causal}, ((2000, 2000),), (4, 1), 64, 64),
    CodedCase("large_wide", _CENTRED, lambda device: {"mask": tw.causal}, ((1500, 2100),), (4, 2), 256, 256),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["codes_summed", "exact_sums"])
@pytest.mark.parametrize("case", FP8_VALUES, ids=repr)
def test_results_are_those_of_the_codes(case: CodedCase, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if grad:  # weights are summed before they are codes where a gradient is wanted
        plain = cases.make_inputs

        def wanting(*args: Any) -> Any:
            made, arguments = plain(*args)
            return [x.requires_grad_() for x in made], arguments

        monkeypatch.setattr(cases, "make_inputs", wanting)
        cases.check_forward(case, torch.bfloat16, ROW, DEVICE)
    else:
        cases.check_forward(case, torch.bfloat16, ROW, DEVICE, exact_sums=False)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_portable_kernel(case: CodedCase, dtype: torch.dtype) -> None:
    cases.check_forward(case, dtype, PORTABLE, DEVICE)


@pytest.mark.parametrize("case", LARGE, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_larger_problems(case: CodedCase, dtype: torch.dtype, row: str) -> None:
    cases.check_forward(case, dtype, row, DEVICE, exact_sums=row == PORTABLE)


@pytest.mark.parametrize(
    "name",
    ["sage2_causal", "fp8_rotated", "softcap", "sink", "packed", "rotated_centred_values", "slopes", "wide_heads"],
)
def test_gradients_go_straight_through(name: str) -> None:
    cases.check_gradients(BY_NAME[name], torch.bfloat16, ROW, DEVICE)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ["sage2", "sage2_causal", "fp8_rotated", "packed", "documents", "wide_documents"])
def test_bits_repeat(name: str, row: str) -> None:
    (q, k, v), arguments = cases.make_inputs(BY_NAME[name], torch.bfloat16, DEVICE)
    first, *others = (
        tw.attention_with_lse(q, k, v, quantize=BY_NAME[name].scheme, impl=row, **arguments) for _ in range(5)
    )
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ["sage2_causal", "packed"])
def test_a_graph_replays_with_other_numbers(name: str, row: str) -> None:
    (q, k, v), arguments = cases.make_inputs(BY_NAME[name], torch.bfloat16, DEVICE)
    scheme = BY_NAME[name].scheme
    graph, o = captured(lambda: tw.attention(q, k, v, quantize=scheme, impl=row, **arguments))
    for x in (q, k, v):
        x.mul_(0.7).add_(0.5)
    graph.replay()
    assert torch.equal(o, tw.attention(q, k, v, quantize=scheme, impl=row, **arguments))


@pytest.mark.parametrize("row", ROWS)
def test_keys_in_pages_under_a_graph_whose_lengths_change(row: str) -> None:
    lengths = ((70, 300), (5, 90), (0, 3), (129, 129))
    case = Case("pages", packed=lengths, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=64)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    pool = paged(inputs, 16)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return tw.attention(
                inputs.q, pool.k, pool.v, mask=tw.causal, layout=pool.layout, quantize=tw.Sage2(), impl=row
            )

    graph, o = captured(step)
    for less in (0, 2):
        pool.layout.seqlens_k.sub_(less)
        graph.replay()
        assert torch.equal(o, step())


def test_inductor_compiles_it_whole() -> None:
    torch._dynamo.reset()
    (q, k, v), arguments = cases.make_inputs(BY_NAME["sage2_causal"], torch.bfloat16, DEVICE)
    q.requires_grad_()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, quantize=tw.Sage2(), **arguments)

    o, want = torch.compile(step, fullgraph=True)(q, k, v), step(q, k, v)
    assert torch.equal(o, want)
    assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (o, want)))


@pytest.mark.parametrize("row", ROWS)
def test_errors_do_not_grow_with_length(row: str) -> None:
    """Each tile's output begins anew: 128k keys of equal weight give the mean of values as exactly as 2k do."""
    errors = []
    for keys in (2048, 131_072):
        q = torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16, device=DEVICE)
        k = torch.randn(1, keys, 1, 128, device=DEVICE).bfloat16()
        v = (1.0 + 0.25 * torch.rand(1, keys, 1, 128, device=DEVICE)).bfloat16()
        o = tw.attention(q, k, v, quantize=tw.Sage2(), impl=row)
        x = tw.quantize_qkv(q, k, v, scheme=tw.Sage2())
        want = x.values(torch.float64).mean(1)
        errors.append(float((o[0].double() - want).abs().max()))
    assert max(errors) <= 2.0**-8 * 1.25, errors  # half a step of the output, 1 to 1.25


@pytest.mark.parametrize("row", ROWS)
def test_rows_behind_a_block_may_be_anything(row: str) -> None:
    """Codes of queries and keys that lie behind those of a sequence, in its last block, are not its own."""
    case = replace(BY_NAME["packed"], lengths=((70, 70), (70, 70)))
    (q, k, v), arguments = cases.make_inputs(case, torch.bfloat16, DEVICE)
    first = tw.attention(q, k, v, quantize=case.scheme, impl=row, **arguments)[:70]
    for x in (q, k, v):
        x[70:] = torch.nan
    assert torch.equal(tw.attention(q, k, v, quantize=case.scheme, impl=row, **arguments)[:70], first)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("scheme", [tw.Sage2(), tw.FA3FP8(), tw.Sage("fp8", rotate="hadamard")], ids=repr)
def test_small_weights_are_left_out(row: str, scheme: tw.Sage | tw.FP8) -> None:
    check_left_out(torch.bfloat16, row, DEVICE, scheme)


OF_INTEGERS = [tw.Sage2(), tw.Sage2pp(), tw.Sage(smooth=("k", "v"), rotate="hadamard"), _BLOCKS]


@pytest.mark.parametrize("size", [1e-3, 0.25, 1.0, 4.0, 64.0, "each block another"], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scheme", [tw.Sage2(), _BLOCKS], ids=repr)
def test_whatever_a_score_is_worth(scheme: tw.Sage, dim: int, size: float | str) -> None:
    """Where that is little or much, and from a tile on whose keys are much larger or smaller than others, the kernel
    has all bits of scores.
    """
    q, k, v = cases.one_head(3000, dim, torch.float16, DEVICE)
    if isinstance(size, float):
        q *= size**0.5
        k *= size**0.5
    else:
        k *= (2.0 ** (torch.arange(3000, device=DEVICE) // 128 % 9 - 5))[:, None, None]
    o, lse = tw.attention_with_lse(q, k, v, quantize=scheme, impl=ROW)
    want, want_lse = by_exponents(tw.quantize_qkv(q, k, v, scheme=scheme))
    off = float((o.double() - want).norm() / want.norm())
    assert off <= cases.OUTPUTS[torch.float16] + 2 * cases.KEPT + 2.0**-9, off
    assert float((lse.double() - want_lse).abs().max()) <= 2.0**-9 + 2.0**-20 * float(lse.abs().max())


@pytest.mark.parametrize("first", [0.0, 14.0, 300.0], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scheme", OF_INTEGERS, ids=repr)
def test_weights_are_codes_of_their_exponents(scheme: tw.Sage, dim: int, first: float) -> None:
    """But for rounding of outputs, for bits that sums of products lose, and for scores of float32 (those of integers
    are exact): rounded to the nearest in place of a code, weights would be 4 % apart. The first key's score is `first`.
    """
    q, k, v = cases.with_first_key(3000, dim, torch.float16, first, DEVICE)
    o, lse = tw.attention_with_lse(q, k, v, quantize=scheme, impl=ROW)
    want, want_lse = by_exponents(tw.quantize_qkv(q, k, v, scheme=scheme))
    off = float((o.double() - want).norm() / want.norm())
    assert off <= cases.OUTPUTS[torch.float16] + 2 * cases.KEPT + 2.0**-9, off
    apart = (lse.double() - want_lse).abs().max()
    assert float(apart) <= 2.0**-9 + 2.0**-20 * float(lse.abs().max())


def _rounded_by_portable(dim: int, pv: str) -> Callable[[Quantized, float], torch.Tensor]:
    keys = triton_codes.tiles(dim, dim).block_n
    dtype = {"fp8": torch.float8_e4m3fn, "fp16": torch.float16}[pv]

    def coded(x: Quantized, off: float) -> torch.Tensor:
        return rounded_weights(x, off, keys, fall=0.0, dtype=dtype)

    return coded


@pytest.mark.parametrize("first", [0.0, 14.0, 300.0], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scheme", OF_INTEGERS, ids=repr)
@pytest.mark.parametrize("kind", ["exponents", "rounded", "portable"])
def test_the_largest_difference_is_that_of_a_rounded_output(kind: str, scheme: tw.Sage, dim: int, first: float) -> None:
    """Of both kernels; Hopper's has codes of exponents as weights, or rounds them where a gradient is wanted."""
    q, k, v = cases.with_first_key(3000, dim, torch.bfloat16, first, DEVICE)
    if kind == "exponents":
        cases.check_codes_of_weights((q, k, v), scheme, ROW, hopper_weights, sums_of_codes=True)
    elif kind == "rounded":
        q.requires_grad_()
        cases.check_codes_of_weights((q, k, v), scheme, ROW, rounded_weights, sums_of_codes=False)
    else:
        coded = _rounded_by_portable(dim, scheme.pv)
        cases.check_codes_of_weights((q, k, v), scheme, PORTABLE, coded, sums_of_codes=False)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_and_where_weights_are_of_16_bits(dim: int) -> None:
    tensors = cases.with_first_key(3000, dim, torch.bfloat16, 14.0, DEVICE)
    coded = _rounded_by_portable(dim, "fp16")
    cases.check_codes_of_weights(tensors, tw.Sage1(), PORTABLE, coded, sums_of_codes=False)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("row", ROWS)
def test_blocks_of_values_far_apart(row: str, dim: int) -> None:
    cases.check_values_apart(torch.bfloat16, row, DEVICE, dim)


APART = [tw.Sage2(), _BLOCKS, tw.FA3FP8(), tw.Sage(q_scale="token", k_scale="token"), tw.Sage("fp8", v_scale="block")]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("side", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("scheme", APART, ids=repr)
def test_what_is_not_a_number_shows(scheme: Scheme, side: int, row: str) -> None:
    """In what shares its scale: of a query some rows, of a key all that see it, of a value its channel or block."""
    tensors = cases.one_head(700, 64, torch.bfloat16, DEVICE)
    tensors[side][0, 150, 0, 5] = torch.nan
    o, lse = tw.attention_with_lse(*tensors, quantize=scheme, impl=row)
    bad = o[0, :, 0].isnan()
    if side == 0:
        assert bool(bad[150].all())
        assert bool(lse[0, 0, 150].isnan())
        assert scheme == tw.FA3FP8() or not bool(bad[:128].any())
    elif side == 1:
        assert bool(bad.all())
        assert bool(lse.isnan().all())
    elif scheme.v_scale == "block":
        assert bool(bad.all())
    else:
        assert bool(bad[:, 5].all())
