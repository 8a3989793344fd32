"""SpargeAttn's functions: the selections and schemes that their arguments become, and what is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.adapters.dense import leaves
from tilewise.adapters import spas_sage_attn as sparge
from tilewise.core.errors import InputError
from tilewise.explain.accuracy import accuracy

Function = Callable[..., Any]
SEQLEN, HEADS = 600, 4
TILES = 5  # of 128
SAGE1 = tw.Sage(pv="fp16", q_scale="block", k_scale="block")
BY_HEAD = torch.linspace(0.3, 0.9, HEADS)
# arguments of each function, and what they mean
SELECTIONS: list[tuple[str, dict[str, Any], tw.Select, tw.Sage]] = [
    ("spas_sage2_attn_meansim_cuda", {}, tw.Select(tw.Sparge()), tw.Sage2()),
    ("spas_sage2_attn_meansim_cuda", {"cdfthreshd": BY_HEAD, "simthreshd1": -1.0, "attention_sink": True},
     tw.Select(tw.Sparge(tuple(BY_HEAD.tolist()), -1.0), tw.sinks(1)), tw.Sage2()),
    ("spas_sage2_attn_meansim_cuda", {"cdfthreshd": 0.5, "pvthreshd": 3, "smooth_k": False},
     tw.Select(tw.Sparge(0.5, lam=3 * math.log(2))), tw.Sage(smooth=())),
    ("spas_sage2_attn_meansim_cuda", {"cdfthreshd": 0.5, "pvthreshd": torch.tensor([1.0, 3.0, 2.0, 1.0])},
     tw.Select(tw.Sparge(0.5, lam=tuple(n * math.log(2) for n in (1, 3, 2, 1)))), tw.Sage2()),
    ("spas_sage2_attn_meansim_topk_cuda", {}, tw.Select(tw.TopK(int(0.35 * TILES), -0.1)), tw.Sage2()),
    ("spas_sage2_attn_meansim_topk_cuda", {"topk": BY_HEAD, "simthreshd1": 0.2},
     tw.Select(tw.TopK(tuple(int(x * TILES) for x in BY_HEAD.tolist()), 0.2)), tw.Sage2()),
    ("spas_sage2_attn_meansim_topk_cuda", {"topk": None, "cdfthreshd": 0.4}, tw.Select(tw.Sparge(0.4, -0.1)),
     tw.Sage2()),
    ("spas_sage_attn_meansim_cuda", {"cdfthreshd": 0.3, "simthreshd1": -1.0}, tw.Select(tw.Sparge(0.3, -1.0)), SAGE1),
    ("spas_sage_attn_meansim_topk_cuda", {"topk": 0.01, "attention_sink": True},
     tw.Select(tw.TopK(1, -0.1), tw.sinks(1)), SAGE1),
]  # fmt: skip


def tensors(seqlen_k: int = SEQLEN) -> list[torch.Tensor]:
    """q, k and v (1, heads, seqlen, dim), float16, whose tiles differ from each other."""
    q, k, v = (x.detach() for x in leaves((1, HEADS, SEQLEN, 32), (1, 2, seqlen_k, 32), (1, 2, seqlen_k, 16)))
    generator = torch.Generator().manual_seed(2)
    centres = 2 * torch.randn(1, 1, TILES, 32, generator=generator).repeat_interleave(128, 2)
    return [x.half() for x in (q + centres[:, :, :SEQLEN], k + centres[:, :, :seqlen_k], v)]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("name", "arguments", "select", "scheme"), SELECTIONS, ids=str)
def test_arguments_become_a_selection(
    name: str, arguments: dict[str, Any], select: tw.Select, scheme: tw.Sage, is_causal: bool, layout: str
) -> None:
    ours = tensors()
    rows = [x.transpose(1, 2) for x in ours]
    given = ours if layout == "HND" else [x.contiguous() for x in rows]
    o, lse = getattr(sparge, name)(
        *given, tensor_layout=layout, is_causal=is_causal, scale=0.2, return_lse=True, **arguments
    )
    formula = {"mask": tw.causal if is_causal else None, "scale": 0.2}
    want, want_lse = tw.attention_with_lse(*rows, select=select, quantize=scheme, **formula)
    assert torch.equal(o.transpose(1, 2) if layout == "HND" else o, want)
    assert torch.equal(lse, want_lse)
    again, sparsity = getattr(sparge, name)(
        *given, tensor_layout=layout, is_causal=is_causal, scale=0.2, return_sparsity=True, **arguments
    )
    assert sparsity == 1 - float(tw.select_tiles(*rows[:2], select, **formula).density())
    assert torch.equal(again, o)


@pytest.mark.parametrize(
    ("pvthreshd", "lam"),
    [
        (50, None),
        (60.0, None),
        (2.5, 2.5 * math.log(2)),
        (torch.tensor([1.0, 4.0, 60.0, 2.0]), tuple(n * math.log(2) for n in (1.0, 4.0, 60.0, 2.0))),
        (torch.tensor([50.0, 60.0]), None),
        (math.inf, None),
        (torch.tensor([5.0, math.inf, 50.0, 2.0]), tuple(n * math.log(2) for n in (5.0, 2000.0, 50.0, 2.0))),
    ],
    ids=str,
)
def test_small_weights_are_left_out_by_powers_of_2(pvthreshd: Any, lam: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU leaves nothing out, so the selection is looked at."""
    seen: list[Any] = []

    def attention(*qkv: torch.Tensor, select: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(select)
        return qkv[0], qkv[0][..., 0]

    monkeypatch.setattr(tw, "attention_with_lse", attention)
    q, k, v = tensors()
    sparge.spas_sage2_attn_meansim_cuda(q, k, v, pvthreshd=pvthreshd)
    kept = torch.ones(1, HEADS, TILES, 2 * TILES, dtype=torch.bool)
    sparge.block_sparse_sage2_attn_cuda(q, k, v, kept, pvthreshd=pvthreshd)
    sparge.block_sparse_sage2_attn_cuda(q, k, v, pvthreshd=pvthreshd)
    assert [None if select is None else select.skip for select in seen] == [lam, lam, lam]


@pytest.mark.parametrize("size", [(128, 64), (64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_tiles_of_ones_own(size: tuple[int, int], sink: bool) -> None:
    q, k, v = tensors(500)
    tiles = (-(-SEQLEN // size[0]), -(-500 // size[1]))
    kept = torch.rand(1, HEADS, *tiles, generator=torch.Generator().manual_seed(3)) < 0.4
    kept[:, 0, 0] = False  # rows that see nothing
    o, lse = sparge.block_sparse_sage2_attn_cuda(q, k, v, kept.to(torch.int8), attention_sink=sink, return_lse=True)
    rows, columns = size
    seen = kept | (torch.arange(tiles[1]) == 0) if sink else kept
    pairs = seen.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :SEQLEN, :500]
    shift = 500 - SEQLEN
    mask = tw.mask(lambda b, h, i, j: pairs[b, h, i - shift, j])
    rows_first = [x.transpose(1, 2) for x in (q, k, v)]
    want, want_lse = tw.attention_with_lse(*rows_first, mask=mask, quantize=tw.Sage2())
    torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(o.transpose(1, 2), want, atol=2e-3, rtol=2e-3)  # a rounding to float16 and to FP8
    assert sink or (bool((lse[:, 0, :rows] == -math.inf).all()) and not o[:, 0, :rows].any())


def test_no_tiles_of_ones_own_are_all() -> None:
    q, k, v = tensors()
    o, sparsity = sparge.block_sparse_sage2_attn_cuda(q, k, v, return_sparsity=True)
    assert sparsity == 0.0
    assert torch.equal(o, tw.attention(*(x.transpose(1, 2) for x in (q, k, v)), quantize=tw.Sage2()).transpose(1, 2))


@pytest.mark.parametrize("pvthreshd", [1e-3, torch.tensor([1e-3, 60.0, 0.5, math.inf])], ids=str)
def test_no_tiles_of_ones_own_leave_out_small_weights(pvthreshd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a map of ones does; in few bits a CPU leaves nothing out, so attention runs on numbers as they are."""
    attention = tw.attention_with_lse

    def plain(*qkv: torch.Tensor, quantize: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(*qkv, **arguments)

    monkeypatch.setattr(tw, "attention_with_lse", plain)
    q, k, v = (torch.zeros(1, HEADS, 2048, 16) for _ in range(3))
    q[..., 0], k[:, :, :384, 0] = 4.0, 1.0  # weights of the first tiles are e times those of the others
    v[:, :, 384:] = 1.0
    ones = torch.ones(1, HEADS, 16, 32, dtype=torch.bool)
    found, want, whole = (
        sparge.block_sparse_sage2_attn_cuda(q, k, v, of, pvthreshd=powers, return_lse=True)
        for of, powers in ((None, pvthreshd), (ones, pvthreshd), (None, 50))
    )
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x, y)
    assert (found[0][:, 0] < 0.7 * whole[0][:, 0]).all(), "something is left out"
    if isinstance(pvthreshd, torch.Tensor):
        torch.testing.assert_close(found[0][:, 1::2], whole[0][:, 1::2], msg="left out by heads of 50 or more, too")
    o, sparsity = sparge.block_sparse_sage2_attn_cuda(q, k, v, pvthreshd=pvthreshd, return_sparsity=True)
    assert sparsity == 0.0
    assert torch.equal(o, want[0])


@pytest.mark.parametrize("share", [0.35, 0.7, 0.29, 0.3, 1 / 3, 0.999])
def test_a_share_in_float32_takes_as_many_tiles(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def attention(*qkv: torch.Tensor, select: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(select.predictions[0].k)
        return qkv[0], qkv[0][..., 0]

    monkeypatch.setattr(tw, "attention_with_lse", attention)
    counted = []
    for tiles in (*range(1, 60), 100, 300):
        x = torch.zeros(1, 1, 128 * tiles, 1)
        for topk in (share, torch.tensor(share), torch.tensor([share])):
            sparge.spas_sage_attn_meansim_topk_cuda(x, x, x, topk=topk)
        counted.append(max(1, math.floor(Fraction(str(share)).limit_denominator(1000) * tiles)))
    assert seen == [k for count in counted for k in (count, count, (count,))]


def test_causal_is_causal_inside_tiles() -> None:
    """Theirs has queries see the whole of the tile that they are in, by SageAttention 2."""
    q, k, v = tensors()
    o = sparge.spas_sage2_attn_meansim_cuda(q, k, v, is_causal=True, simthreshd1=1.0).transpose(1, 2)
    exact = tw.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=tw.causal)
    for rows in (slice(0, 64), slice(0, SEQLEN)):
        assert accuracy(o[:, rows], exact[:, rows]).relative_l1 < 0.06  # of codes


def test_a_mask_is_a_mask() -> None:
    q, k, v = tensors()
    seen = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    select = {"cdfthreshd": 1.0, "return_lse": True}
    found = sparge.spas_sage2_attn_meansim_cuda(q, k, v, attn_mask=seen, **select)
    want = sparge.spas_sage2_attn_meansim_cuda(q, k, v, is_causal=True, **select)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", sparge.__all__)
def test_unknown_keywords_are_errors(name: str) -> None:
    with pytest.raises(TypeError, match="l1"):
        getattr(sparge, name)(*tensors(), l1=0.07)
    order = list(inspect.signature(getattr(sparge, name)).parameters)
    assert order[:3] == ["q", "k", "v"]
    assert order[-5:] == ["attention_sink", "tensor_layout", "output_dtype", "return_sparsity", "return_lse"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("spas_sage2_attn_meansim_cuda", {"dropout_p": 0.1}, "dropout_p"),
        ("spas_sage2_attn_meansim_cuda", {"cdfthreshd": 1.5}, "Sparge tau"),
        ("spas_sage2_attn_meansim_cuda", {"cdfthreshd": torch.ones(2, 2)}, "cdfthreshd"),
        ("spas_sage2_attn_meansim_cuda", {"pvthreshd": 0}, "pvthreshd"),
        ("spas_sage2_attn_meansim_cuda", {"pvthreshd": "50"}, "pvthreshd"),
        ("spas_sage2_attn_meansim_cuda", {"return_sparsity": True, "return_lse": True}, "return_sparsity"),
        ("spas_sage2_attn_meansim_cuda", {"tensor_layout": "LHD"}, "tensor_layout"),
        ("spas_sage_attn_meansim_topk_cuda", {"topk": 0.0}, "topk"),
        ("spas_sage_attn_meansim_topk_cuda", {"topk": 3}, "topk"),
        ("spas_sage2_attn_meansim_topk_cuda", {"cdfthreshd": 0.9}, "topk, cdfthreshd: got both"),
        ("spas_sage2_attn_meansim_topk_cuda", {"topk": None}, "topk, cdfthreshd: got neither"),
        ("block_sparse_sage2_attn_cuda", {"pvthreshd": -1.0}, "pvthreshd"),
        ("spas_sage2_attn_meansim_cuda", {"pvthreshd": torch.tensor([1.0, math.nan, 1.0, 1.0])}, "pvthreshd"),
        ("block_sparse_sage2_attn_cuda", {"tensor_layout": "LHD"}, "tensor_layout"),
        ("block_sparse_sage2_attn_cuda", {"mask_id": torch.ones(1, HEADS, 3, 3)}, "mask_id"),
        ("block_sparse_sage2_attn_cuda", {"mask_id": torch.ones(1, HEADS, 7, 5, dtype=torch.bool)}, "mask_id"),
    ],
)
def test_what_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        getattr(sparge, name)(*tensors(), **arguments)


def test_tensors_of_other_ranks_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(InputError, match="q"):
        sparge.spas_sage2_attn_meansim_topk_cuda(q[0], k[0], v[0])


@pytest.mark.parametrize("kept", [None, torch.ones(1, HEADS, TILES, TILES, dtype=torch.bool)], ids=["all", "own"])
def test_what_is_no_tensor_is_refused(kept: Any) -> None:
    q, k, v = tensors()
    for name, given in {"q": (None, k, v), "k": (q, k.tolist(), v), "v": (q, k, "v")}.items():
        for pvthreshd in (50, 2):
            with pytest.raises(InputError, match=f"{name}: got"):
                sparge.block_sparse_sage2_attn_cuda(*given, kept, pvthreshd=pvthreshd)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="q: got shape"):
        sparge.block_sparse_sage2_attn_cuda(q[0], k, v, kept)
