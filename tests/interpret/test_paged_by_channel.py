"""Attention over keys by channel in the interpreter, and twins that must fail."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.interpret.test_paged import ANY_BATCH, any_batch, programs
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_channels, triton_paged
from tilewise.quant import KINDS, encode, encode_by_channel
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import by_channel, encoded, paged
from tilewise.testing.properties import Setting
from tilewise.tiles import codes

PAGED = Setting("triton_paged")
NAMES = ("one_query", "few_queries", "packed_cross_causal", "packed_window_sink", "gqa_4")


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six programs, and no plan remembered from others."""
    monkeypatch.setattr(triton_launch, "remember", False)
    programs(monkeypatch, 3)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("name", NAMES)
def test_pages_hold_the_keys(name: str, bits: int) -> None:
    page_size = {"packed_window_sink": 5, "gqa_4": 1, "few_queries": 128}.get(name, 16)
    kind = list(KINDS)[len(name) % 3]
    properties.encoded_pages_hold_the_keys(PAGED, CASES[name], kind, page_size, flat=page_size == 5, bits=bits)


@pytest.mark.parametrize("page_size", [1, 7, 16, 32, 64, 96])
@pytest.mark.parametrize("bits", [4, 2])
def test_pages_of_any_size(bits: int, page_size: int) -> None:
    """Tiles of several pages, and pages of several tiles, whose last one is open."""
    case = Case("sizes", packed=((1, 150), (2, 64), (1, 0)), heads_q=4, head_dim=16, head_dim_v=24)
    properties.encoded_pages_hold_the_keys(PAGED, case, "int8", page_size, bits=bits)
    half = Setting("triton_paged", torch.float16)
    properties.encoded_pages_hold_the_keys(half, case, "int4", page_size, bits=bits)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 40), (96, 2), (4, 96)])
def test_head_dims_that_fill_no_tile(head_dim: int, head_dim_v: int, bits: int) -> None:
    case = Case("dims", packed=((1, 90), (2, 30), (1, 0)), heads_q=4, head_dim=head_dim, head_dim_v=head_dim_v)
    properties.encoded_pages_hold_the_keys(PAGED, case, "int4", 7, bits=bits)


@pytest.mark.parametrize("bits", [4, 2])
def test_chunks(bits: int) -> None:
    for page_size in (8, 64):
        properties.encoded_pages_hold_the_keys(
            PAGED, CASES["packed_cross_causal"], "fp8", page_size, bits=bits, batch_invariant=True
        )


@settings(max_examples=20, deadline=None)
@given(batch=ANY_BATCH, bits=st.sampled_from([4, 2]))
def test_any_lengths(batch: dict[str, Any], bits: int) -> None:
    with any_batch(batch) as (case, page_size):
        properties.encoded_pages_hold_the_keys(PAGED, case, "int8", page_size, bits=bits)


@pytest.mark.parametrize("page_size", [8, 32])
def test_any_strides_and_plans_that_are_remembered(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scales, least numbers and open pages; and other bits are other kernels."""
    monkeypatch.setattr(triton_launch, "remember", True)
    inputs = make_inputs(Case("strides", seqlen_q=3, seqlen_k=75), torch.float32)
    pool = paged(inputs, page_size)
    v = encoded(pool.v, "int8")
    for bits in (4, 2, 4):
        whole = by_channel(pool.k, bits)
        apart = type(whole)(
            whole.data,
            whole.scale.transpose(0, 1).contiguous().transpose(0, 1),
            torch.cat([whole.least, whole.least], -1)[..., : whole.least.shape[-1]],
            whole.open.transpose(1, 2).contiguous().transpose(1, 2),
            whole.place,
        )
        with torch.no_grad():
            found = [tw.attention(inputs.q, k, v, layout=pool.layout, impl="triton_paged") for k in (whole, apart)]
            want = tw.attention(inputs.q, whole, v, layout=pool.layout, impl="reference")
        assert torch.equal(*found)
        torch.testing.assert_close(found[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [4, 32])
@pytest.mark.parametrize("bits", [4, 2])
def test_a_channel_that_is_not_finite_reaches_who_sees_its_page(bits: int, page_size: int) -> None:
    inputs = make_inputs(Case("nan", packed=((3, 64), (3, 64)), mask=None), torch.float32)
    pool = paged(inputs, page_size)
    assert isinstance(pool.layout.block_table, torch.Tensor)
    pool.k[pool.layout.block_table[1, 1].item(), 2, 0, 5] = torch.inf  # type: ignore[index]
    k, v = by_channel(pool.k.nan_to_num(nan=0.0, posinf=torch.inf), bits), encode(pool.v.nan_to_num(), "int8")
    with torch.no_grad():
        o = tw.attention(inputs.q, k, v, layout=pool.layout, mask=tw.causal, impl="triton_paged")
    assert o[:3].isfinite().all()
    assert o[3:, :1].isnan().all()


def test_shared_prefixes() -> None:
    """Requests whose common pages are full, and whose last ones are open: as without sharing."""
    page_size, batch = 16, 6
    make = torch.Generator().manual_seed(0)
    x = torch.randn(20, page_size, 2, 16, generator=make)
    k, v = encode_by_channel(x, 4), encode(torch.randn(20, page_size, 2, 16, generator=make), "int8")
    place = k.place.clone()
    place[8 : 8 + batch] = torch.arange(batch, dtype=torch.int32)
    k = type(k)(k.data, k.scale, k.least, torch.randn(batch, page_size, 2, 16, generator=make), place)
    table = torch.tensor([[*range(8), 8 + r] for r in range(batch)], dtype=torch.int32)
    seqlens = torch.arange(129, 129 + batch, dtype=torch.int32)
    q = torch.randn(batch, 1, 4, 16, generator=make)
    found = [
        tw.attention(q, k, v, layout=tw.Paged(table, seqlens, share_prefixes=share), impl="triton_paged")
        for share in (False, True)
    ]
    why = tw.why(q, k, v, layout=tw.Paged(table, seqlens, share_prefixes=True), impl="triton_paged")
    assert "shares prefixes" in str(why)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


TWINS = [
    (triton_channels, "in_k & (place >= 0)", "in_k & (place < 0)", 8),
    (triton_channels, "page * decoded(SCALES[11]) + hk", "hk", 8),
    (triton_channels, "hk * decoded(SCALES[3])", "0 * hk", 32),
    (triton_channels, "hk * decoded(SCALES[15])", "0 * hk", 8),
    (triton_channels, "offsets * decoded(SCALES[14])", "0 * offsets", 32),
    (triton_channels, "place.to(tl.int64) * decoded(SCALES[13])", "0 * place", 8),
    (triton_paged, "columns_of_codes(tl.arange(0, BLOCK_D), HEAD_DIM, ENCODING, BITS)", "tl.arange(0, BLOCK_D)", 8),
    (codes, "codes & 15, 0), whole(codes >> 4", "codes >> 4, 0), whole(codes & 15", 8),
    (codes, " + least.to(tl.float32)", "", 32),
]


@pytest.mark.parametrize(("module", "old", "new", "page_size"), TWINS)
def test_a_broken_twin_is_caught(
    module: ModuleType, old: str, new: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("twins", packed=((1, 80), (2, 41)), heads_q=4, mask=None)
    properties.encoded_pages_hold_the_keys(PAGED, case, "int8", page_size, bits=4)  # whole, it passes
    copy = broken_copy(module, old, new, tmp_path)
    place, name = {
        triton_paged: (triton_paged, "attention_work"),
        triton_channels: (triton_paged, "load_by_channel"),
        codes: (triton_channels, "keys_of_codes"),
    }[module]
    monkeypatch.setattr(place, name, getattr(copy, name))
    with pytest.raises(AssertionError):
        properties.encoded_pages_hold_the_keys(PAGED, case, "int8", page_size, bits=4)
