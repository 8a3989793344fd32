"""The Hopper kernel for few queries over pages: formulas, groups, shares in pieces, and what it cannot copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.paging import PAGED_CASES, UP_TO_256, decoding, lengths_around_pages
from tilewise.core.errors import UnsupportedError
from tilewise.ops.attention import gluon_decode
from tilewise.ops.triton_launch import Plans
from tilewise.quant import KINDS, decode, encode
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import causal, window
from tilewise.testing.graphs import captured
from tilewise.testing.properties import Setting

IMPL = "hopper_decode"
POSITIONS_ALONE = ("score_by_row", "score_by_key", "score_constant", "score_clock")  # scores that it refuses
FORMULAS = [
    case
    for case in PAGED_CASES
    if (case.mask or case.score) and "undefined" not in case.name and case.name not in POSITIONS_ALONE
][::3]


@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.bfloat16), (5, torch.float16), (64, torch.bfloat16)])
@pytest.mark.parametrize("case", UP_TO_256, ids=repr)
def test_large_cases(case: Case, page_size: int, dtype: torch.dtype) -> None:
    properties.pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, page_size, flat=page_size == 5)


@pytest.mark.parametrize("case", [case for case in UP_TO_256 if not case.packed], ids=repr)
def test_keys_in_rows(case: Case) -> None:
    """The dense layout is read as pages of which each batch element has one."""
    properties.equals_reference(Setting(IMPL, torch.bfloat16, DEVICE), case)
    properties.memory_does_not_matter(Setting(IMPL, torch.float16, DEVICE), case, unit=16)


def test_keys_in_rows_that_grow() -> None:
    """Other lengths compile nothing, and a graph keeps what it was captured with."""
    q = torch.randn(3, 1, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    cache = torch.randn(2, 3, 700, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    for length in (1, 300, 301, 302, 700):
        k, v = cache[:, :, :length]
        found = tw.attention(q, k, v, impl=IMPL)
        torch.testing.assert_close(found, tw.attention(q, k, v, impl="reference"), rtol=2e-2, atol=2e-3)
    graph, result = captured(lambda: tw.attention(q, *cache[:, :, :699], impl=IMPL))
    tw.attention(q, *cache[:, :, :699], impl=IMPL)
    q.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, tw.attention(q, *cache[:, :, :699], impl=IMPL))


@pytest.mark.parametrize("case", FORMULAS, ids=repr)
def test_formulas(case: Case) -> None:
    wide = case.with_(head_dim=80, head_dim_v=96)
    properties.pages_hold_the_keys(Setting(IMPL, torch.float16, DEVICE), wide, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", UP_TO_256, ids=repr)
def test_codes_hold_the_keys(case: Case, kind: str) -> None:
    setting = Setting(IMPL, torch.bfloat16, DEVICE)
    properties.encoded_pages_hold_the_keys(setting, case, kind, 5 if case.packed else 16, fp8=kind == "fp8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FORMULAS[::3], ids=repr)
def test_codes_and_formulas(case: Case, kind: str) -> None:
    wide = case.with_(head_dim=96, head_dim_v=64)
    setting = Setting(IMPL, torch.bfloat16, DEVICE)
    properties.encoded_pages_hold_the_keys(setting, wide, kind, 7, fp8=kind == "fp8")


@pytest.mark.parametrize("kind", KINDS)
def test_scales_far_apart(kind: str) -> None:
    """Rows of zeros, of NaN, and values a thousand times others', after which small ones count no less."""
    q, pool, layout = decoding([3000, 700, 64, 2000])
    k, v = (encode(x.nan_to_num(), kind) for x in pool)
    assert isinstance(layout.block_table, torch.Tensor)
    table = layout.block_table.long()
    k.scale[table[0, 3]] = 0.0
    v.scale[table[0, 5]] = 0.0
    v.scale[table[1, 2], 4] *= 1000.0
    k.scale[table[2, 1], 3, 2] = torch.nan  # for one head of the third request
    v.scale[table[3, 7], 1, 5] = torch.nan
    o, lse = tw.attention_with_lse(q, k, v, layout=layout, impl=IMPL)
    want, want_lse = tw.attention_with_lse(q, k, v, layout=layout, impl="reference")
    assert torch.equal(o.isnan(), want.isnan())
    assert int(o.isnan().all(-1).sum()) == 8  # two groups of four heads
    half = torch.finfo(torch.bfloat16).eps / 2  # weights are rounded before the product, and o after it
    lengths = [int(n) for n in layout.seqlens_k]
    values = [decode(v)[row[: -(-n // 16)]].nan_to_num().abs().amax() for row, n in zip(table, lengths, strict=True)]
    allowed = 2 * half * want.abs() + half * torch.stack(values)[:, None, None]
    assert bool(((o - want).abs() <= allowed)[~want.isnan()].all())
    part = q.abs().amax() / (2 * 127 * 254)  # by which a query in two bytes may be off
    if kind == "fp8":  # each of four products of 32 dimensions keeps 14 bits
        part = 4 * 2.0**-14 * q.abs().amax()
    apart = part * decode(k).nan_to_num().abs().sum(-1).amax() * q.shape[-1] ** -0.5
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=float(apart) + 1e-4, equal_nan=True)


@pytest.mark.parametrize("group", [1, 2, 8, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_and_shares(head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty requests, ones of a key, shares of one tile; and with few programs large shares, in pieces."""
    sizes: dict[str, Any] = {"heads_q": 2 * group, "heads_kv": 2, "head_dim": head_dim, "head_dim_v": head_dim}
    short = Case("short", packed=tuple((1, n) for n in (0, 1, 127, 128, 129, 0, 1000)), **sizes)
    properties.pages_hold_the_keys(Setting(IMPL, torch.bfloat16, DEVICE), short, 16)
    monkeypatch.setattr(gluon_decode, "_PLANS", Plans())
    monkeypatch.setattr(gluon_decode, "multiprocessors", lambda device: 3)
    long = Case("long", packed=((1, 9_000), (1, 16_000), (2, 3)), **sizes)
    properties.pages_hold_the_keys(Setting(IMPL, torch.bfloat16, DEVICE), long, 16)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("mask", [None, causal, window(100)], ids=["full", "causal", "window"])
def test_lengths_around_pages(mask: Any, head_dim: int) -> None:
    lengths_around_pages(IMPL, mask, head_dim)


def test_what_it_cannot_read_is_left_to_others() -> None:
    """Strides that copies of 16 bytes cannot follow and scores of positions alone are refused; keys that start
    elsewhere are read by the portable kernel.
    """
    q, pool, layout = decoding([500, 1, 700])
    want = tw.attention(q, *pool, layout=layout, impl="triton_paged")
    for start in (1, 4):
        empty = [torch.empty(x.numel() + 8, dtype=x.dtype, device=DEVICE)[start:][: x.numel()] for x in pool]
        moved = [x.view(like.shape).copy_(like) for x, like in zip(empty, pool, strict=True)]
        torch.testing.assert_close(tw.attention(q, *moved, layout=layout, impl=IMPL), want, rtol=0, atol=0)
    apart = [torch.zeros(*x.shape[:2], 8, 136, dtype=x.dtype, device=DEVICE)[..., :128].copy_(x) for x in pool]
    with pytest.raises(UnsupportedError, match="multiples of 16 elements"):
        tw.attention(q, *apart, layout=layout, impl=IMPL)
    torch.testing.assert_close(tw.attention(q, *apart, layout=layout), want, rtol=2e-2, atol=2e-3)
    with pytest.raises(UnsupportedError, match="reads the score"):
        tw.attention(q, *pool, layout=layout, score=lambda s, b, h, i, j: 0.1 * j, impl=IMPL)
