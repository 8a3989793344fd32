"""Attention over encoded pages in the interpreter, twins that must fail, and every code as a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.interpret.test_paged import ANY_BATCH, any_batch, programs
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_paged, triton_parts
from tilewise.quant import KINDS, Encoded, decode, encode
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import encoded, paged
from tilewise.testing.properties import Setting
from tilewise.tiles import codes

PAGED = Setting("triton_paged")
NAMES = ("one_query", "few_queries", "packed_cross_causal", "packed_window_sink", "gqa_4")


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six programs, and no plan remembered from others."""
    monkeypatch.setattr(triton_launch, "remember", False)
    programs(monkeypatch, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_codes_hold_the_keys(name: str, kind: str) -> None:
    page_size = {"packed_window_sink": 5, "gqa_4": 1, "few_queries": 128}.get(name, 16)
    properties.encoded_pages_hold_the_keys(PAGED, CASES[name], kind, page_size, flat=page_size == 5)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str) -> None:
    for name in ("one_query", "packed_cross_causal"):
        properties.encoded_pages_hold_the_keys(Setting("triton_paged", torch.float16), CASES[name], kind, 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 40), (96, 2), (2, 96)])
def test_head_dims_that_fill_no_tile(head_dim: int, head_dim_v: int, kind: str) -> None:
    """With several programs, so that parts of rows are merged."""
    case = Case("dims", packed=((1, 90), (2, 30), (1, 0)), heads_q=4, head_dim=head_dim, head_dim_v=head_dim_v)
    properties.encoded_pages_hold_the_keys(PAGED, case, kind, 7)


@settings(max_examples=20, deadline=None)
@given(batch=ANY_BATCH, kind=st.sampled_from(list(KINDS)))
def test_any_lengths(batch: dict[str, Any], kind: str) -> None:
    with any_batch(batch) as (case, page_size):
        properties.encoded_pages_hold_the_keys(PAGED, case, kind, page_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [-14, 10])
def test_values_of_any_size(exponent: int, kind: str) -> None:
    """In float16 too, whose products with small scales would be 0."""
    inputs = make_inputs(Case("sizes", batch=2, seqlen_q=1, seqlen_k=60), torch.float16)
    pool = paged(inputs, 16)
    with torch.no_grad():
        v = encoded(pool.v.double() * 2.0**exponent, kind)
        k = encoded(pool.k, kind)
        got = tw.attention(inputs.q, k, v, layout=pool.layout, impl="triton_paged")
        want = tw.attention(inputs.q, k, v, layout=pool.layout, impl="reference")
    torch.testing.assert_close(got, want, rtol=4e-3, atol=float(want.abs().max()) * 4e-3)


def test_scales_may_have_any_strides() -> None:
    """Those of values others than those of keys; and plans that are remembered tell them apart."""
    inputs = make_inputs(Case("strides", seqlen_q=3, seqlen_k=40), torch.float32)
    pool = paged(inputs, 4)
    k, v = encoded(pool.k, "int8"), encoded(pool.v, "int8")
    apart = Encoded(v.data, v.scale.transpose(0, 2).contiguous().transpose(0, 2))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(triton_launch, "remember", True)
        for _ in range(2):
            found = [
                tw.attention(inputs.q, k, values, layout=pool.layout, impl="triton_paged") for values in (v, apart)
            ]
            assert torch.equal(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_finite_reaches_who_sees_it(kind: str) -> None:
    inputs = make_inputs(Case("nan", packed=((3, 12), (3, 12)), mask=None), torch.float32)
    pool = paged(inputs, 4)
    assert isinstance(pool.layout.block_table, torch.Tensor)
    pool.k[pool.layout.block_table[1, 2].item(), 2] = torch.nan  # type: ignore[index]
    k, v = encode(pool.k, kind), encode(pool.v, kind)
    with torch.no_grad():
        o = tw.attention(inputs.q, k, v, layout=pool.layout, mask=tw.causal, impl="triton_paged")
    assert o[:4].isfinite().all()
    assert o[4:].isnan().all()


TWINS = [
    ("s *= scales[0][None, :]", "s *= scales[1][None, :]", "int8"),
    ("numbers_of(v, ENCODING).to(q.dtype), scales[1]", "numbers_of(v, ENCODING).to(q.dtype), scales[0]", "fp8"),
    ("offsets * decoded(SCALES[3])", "offsets * 0", "int8"),
    ("hk * decoded(SCALES[7])", "0 * hk", "int8"),
    ("page * decoded(SCALES[5])", "0 * page", "fp8"),
    ("columns_of_codes(tl.arange(0, BLOCK_D), HEAD_DIM, ENCODING, BITS)", "tl.arange(0, BLOCK_D)", "int4"),
    ("columns_of_codes(tl.arange(0, o.shape[1]), HEAD_DIM_V, ENCODING)", "tl.arange(0, o.shape[1])", "int4"),
    ("tl.load(SCALES[1] + v_at, mask=in_k, other=0.0)", "tl.load(SCALES[1] + v_at)", "int8"),
]


@pytest.mark.parametrize(("old", "new", "kind"), TWINS)
def test_a_broken_twin_is_caught(
    old: str, new: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("twins", packed=((1, 30), (2, 9)), heads_q=4, mask=None)
    properties.encoded_pages_hold_the_keys(PAGED, case, kind, 4)  # whole, it passes
    module, name = (triton_parts, "store_rows") if "o.shape" in old else (triton_paged, "attention_work")
    monkeypatch.setattr(triton_paged, name, getattr(broken_copy(module, old, new, tmp_path), name))
    with pytest.raises(AssertionError):
        properties.encoded_pages_hold_the_keys(PAGED, case, kind, 4)


@triton.jit
def numbers(CODES, OUT, ENCODING: tl.constexpr, N: tl.constexpr):
    """One row of bytes as numbers."""
    rows = tl.zeros([1], tl.int32)
    x = codes.numbers_of(codes.load_codes(CODES, rows, rows == 0, N, N, ENCODING), ENCODING)
    tl.store(OUT + codes.columns_of_codes(tl.arange(0, N), N, ENCODING), tl.reshape(x, [N]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_its_number(kind: str) -> None:
    """But for NaN, which float8 has and no encoder makes."""
    every = torch.arange(256, dtype=torch.uint8).view(KINDS[kind].dtype)
    want = decode(Encoded(every, torch.ones(())))
    got = torch.empty_like(want)
    numbers[(1,)](every.view(torch.uint8), got, kind, len(want))
    if kind == "fp8":
        want = torch.where(want.isnan(), got, want)
    assert torch.equal(got, want)
