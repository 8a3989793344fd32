"""Cases of attention over selected tiles, an oracle that knows no tiles but by loops, and what must hold anywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.attention.choice import Selected
from tilewise.testing import plain
from tilewise.testing.budgets import DRAWS, FACTOR, ORDER
from tilewise.testing.plain import Function

Formulas = tuple[dict[str, Any], dict[str, Function]]  # for `attention`, and as plain functions of index tensors


def _nothing(device: str) -> Formulas:
    return {}, {}


def _causal(device: str) -> Formulas:
    return {"mask": tw.causal}, {"mask": plain.causal}


def _window_alibi(device: str) -> Formulas:
    slopes = torch.linspace(0.02, 0.1, 4, device=device)
    return (
        {"mask": tw.window(70), "score": tw.alibi(slopes)},
        {"mask": plain.window(70), "score": lambda s, b, h, i, j: s - slopes[h].to(s.dtype) * torch.abs(i - j)},
    )


def _softcap(device: str) -> Formulas:
    return {"mask": tw.causal, "score": tw.softcap(3.0)}, {"mask": plain.causal, "score": plain.softcap(3.0)}


def _padding(device: str) -> Formulas:
    seqlens = torch.tensor([0, 77], device=device)  # the first batch element sees nothing
    return {"mask": tw.lengths(seqlens)}, {"mask": plain.prefix(seqlens)}


def _sink(device: str) -> Formulas:
    sink = torch.linspace(-1.0, 2.0, 4, device=device)
    return {"mask": tw.causal, "sink": sink}, {"mask": plain.causal}


@dataclass(frozen=True)
class SelectCase:
    """Queries and keys of some lengths under a formula and a selection."""

    name: str
    select: tw.Select
    made: Callable[[str], Formulas] = _nothing
    lengths: tuple[tuple[int, int], ...] = ((150, 150), (150, 150))
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    dim_v: int = 32
    packed: bool = False

    def __repr__(self) -> str:
        return self.name


RAGGED = ((100, 100), (0, 3), (7, 90), (33, 33), (5, 0), (1, 1))
BLOCK = (32, 16)
CASES = [
    SelectCase("mass", tw.Select(tw.Sparge(0.5, -1.0), block=BLOCK)),
    SelectCase("mass_causal", tw.Select(tw.Sparge(0.4, 0.06), block=BLOCK), _causal),
    SelectCase("mass_by_head", tw.Select(tw.Sparge((0.1, 0.3, 0.6, 1.0), (-1.0, 0.05, 0.06, 0.9)), block=BLOCK)),
    SelectCase("count", tw.Select(tw.TopK(3), block=BLOCK), _causal),
    SelectCase("share", tw.Select(tw.TopK(0.3), block=BLOCK, share_group=True), _causal),
    SelectCase("weight", tw.Select(tw.Threshold(0.12), block=BLOCK), _window_alibi),
    SelectCase("masks", tw.Select(tw.window(20), tw.sinks(5), block=BLOCK), _causal),
    SelectCase("mixed", tw.Select(tw.TopK(1), tw.window(4, 3), block=(16, 32)), _softcap),
    SelectCase("odd_tiles", tw.Select(tw.TopK(0.4), block=(24, 40)), _causal, ((70, 131), (70, 131))),
    SelectCase("few_queries", tw.Select(tw.TopK(0.4), block=BLOCK), _causal, ((9, 130), (9, 130))),
    SelectCase("one_query", tw.Select(tw.Sparge(0.3, -1.0), block=BLOCK), _causal, ((1, 129),)),
    SelectCase("short", tw.Select(tw.Sparge(0.3, -1.0), block=(128, 128)), _causal, ((20, 20),)),
    SelectCase("empty_rows", tw.Select(tw.TopK(2), block=BLOCK), _padding),
    SelectCase("sink", tw.Select(tw.TopK(2), block=BLOCK), _sink),
    SelectCase("packed", tw.Select(tw.TopK(2), block=BLOCK), _causal, RAGGED, packed=True),
    SelectCase("packed_mass", tw.Select(tw.Sparge(0.4, 0.06), tw.sinks(3), block=(16, 16)), _window_alibi, RAGGED,
               packed=True),
    SelectCase("summary", tw.Select(tw.TopK(2), block=BLOCK, far="summary")),
    SelectCase("summary_causal", tw.Select(tw.TopK(1), block=BLOCK, far="summary"), _causal, dim_v=48),
    SelectCase("summary_capped", tw.Select(tw.TopK(1), block=BLOCK, far="summary"), _softcap),
    SelectCase("summary2", tw.Select(tw.TopK(1), tw.window(4, 3), block=BLOCK, far="summary2"), _window_alibi),
    SelectCase("summary_sink", tw.Select(tw.TopK(2), block=BLOCK, far="summary2"), _sink),
    SelectCase("summary_few_queries", tw.Select(tw.TopK(2), block=BLOCK, far="summary"), _causal, ((9, 130),)),
    SelectCase("summary_packed", tw.Select(tw.TopK(1), block=BLOCK, far="summary2"), _causal, RAGGED, packed=True),
]  # fmt: skip


def make_inputs(case: SelectCase, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """[q, k, v]: queries and keys of neighbours are alike."""
    generator = torch.Generator().manual_seed(len(case.name))
    made: list[torch.Tensor] = []
    for side, heads, dim in (
        (0, case.heads[0], case.dim),
        (1, case.heads[1], case.dim),
        (1, case.heads[1], case.dim_v),
    ):
        lengths = [both[side] for both in case.lengths]
        lead = (sum(lengths),) if case.packed else (len(lengths), lengths[0])
        x = torch.randn(*lead, heads, dim, generator=generator)
        drift = torch.randn(*lead, heads, dim, generator=generator).cumsum(-3) * 0.15
        made.append((x + drift).to(device, dtype).requires_grad_())
    return made


def arguments_of(case: SelectCase, device: str = "cpu") -> dict[str, Any]:
    """Those of `attention`, without the selection."""
    arguments = case.made(device)[0]
    if case.packed:
        cu = [torch.tensor([0, *itertools.accumulate(both[n] for both in case.lengths)]) for n in (0, 1)]
        arguments["layout"] = tw.Packed(*(x.to(device, torch.int32) for x in cu))
    return arguments


def kept_of(case: SelectCase, selected: Selected) -> list[torch.Tensor]:
    """For each sequence, its map (query heads, tiles_q, tiles_k)."""
    rows, columns = selected.block
    kept = selected.kept.repeat_interleave(case.heads[0] // selected.kept.shape[1], 1)
    found = []
    starts = (0, 0)
    for b, (queries, keys) in enumerate(case.lengths):
        of_q, of_k = -(-queries // rows), -(-keys // columns)
        if case.packed:
            first = (starts[0] // rows + b, starts[1] // columns + b)
            found.append(kept[0, :, first[0] : first[0] + of_q, first[1] : first[1] + of_k])
            starts = (starts[0] + queries, starts[1] + keys)
        else:
            found.append(kept[b % kept.shape[0]])
    return found


def sequences(case: SelectCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """q, k and v of each sequence, (heads, seqlen, dim), keys and values for each query head."""
    group = case.heads[0] // case.heads[1]
    k, v = k.repeat_interleave(group, -2), v.repeat_interleave(group, -2)
    if not case.packed:
        return [tuple(x[b].transpose(0, 1) for x in (q, k, v)) for b in range(len(case.lengths))]
    of_q, of_k = ([both[n] for both in case.lengths] for n in (0, 1))
    split = (torch.split(q, of_q), torch.split(k, of_k), torch.split(v, of_k))
    return [tuple(x.transpose(0, 1) for x in parts) for parts in zip(*split, strict=True)]


def visible_of(case: SelectCase, b: int, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(What the mask lets a sequence see (heads, seqlen_q, seqlen_k), its index tensors)"""
    queries, keys = case.lengths[b]
    symbols = {
        "b": torch.tensor(b, device=device),
        "h": torch.arange(case.heads[0], device=device)[:, None, None],
        "i": torch.arange(queries, device=device)[:, None] + keys - queries,
        "j": torch.arange(keys, device=device),
    }
    function = case.made(device)[1].get("mask")
    everything = torch.ones(case.heads[0], queries, keys, dtype=torch.bool, device=device)
    return everything if function is None else everything & function(**symbols), symbols


def oracle(
    case: SelectCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: list[torch.Tensor], compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse like it without its last dimension), every score materialised, in float64 or as plain PyTorch
    computes in another dtype; where nothing is seen lse is 0.
    """
    device = q.device.type
    formulas, functions = case.made(device)
    score, sink, far = functions.get("score"), formulas.get("sink"), case.select.far
    rows, columns = case.select.block
    found = []
    for b, (qs, ks, vs) in enumerate(sequences(case, q.to(compute), k.to(compute), v.to(compute))):
        visible, symbols = visible_of(case, b, device)
        s = qs @ ks.transpose(-1, -2) * case.dim**-0.5
        s = s if score is None else score(s, **symbols)
        near = kept[b].repeat_interleave(rows, -2).repeat_interleave(columns, -1)[:, : qs.shape[1], : ks.shape[1]]
        s, values = s.masked_fill(~(visible & near), -torch.inf), vs
        if far != "drop":
            for n in range(-(-ks.shape[1] // columns)):
                tile = slice(n * columns, min((n + 1) * columns, ks.shape[1]))
                count = tile.stop - tile.start
                mean = ks[:, tile].mean(1, keepdim=True)
                one = qs @ mean.transpose(-1, -2) * case.dim**-0.5
                if far == "summary2":
                    spread = ((ks[:, tile] - mean) ** 2).mean(1, keepdim=True)
                    one = one + (qs * qs) @ spread.transpose(-1, -2) * (0.5 / case.dim)
                at = torch.tensor([(tile.start + tile.stop - 1) // 2], device=q.device)
                one = (one if score is None else score(one, **symbols | {"j": at})) + math.log(count)
                for m in range(kept[b].shape[1]):
                    of_tile = slice(m * rows, (m + 1) * rows)
                    whole = visible[:, of_tile, tile].all((-1, -2)) & ~kept[b][:, m, n]
                    one[:, of_tile] = one[:, of_tile].masked_fill(~whole[:, None, None], -torch.inf)
                s = torch.cat([s, one], -1)
                values = torch.cat([values, vs[:, tile].mean(1, keepdim=True)], 1)
        if sink is not None:
            s = torch.cat([s, sink.to(compute)[:, None, None].expand(*s.shape[:2], 1)], -1)
            values = torch.cat([values, values.new_zeros(values.shape[0], 1, values.shape[2])], 1)
        sees = (s > -torch.inf).any(-1, keepdim=True)
        p = torch.where(sees, torch.softmax(s, -1), 0.0)
        lse = torch.logsumexp(torch.where(sees, s, 0.0), -1)
        found.append(((p @ values).transpose(0, 1), lse.transpose(0, 1)))
    join = torch.cat if case.packed else torch.stack
    return join([o for o, _ in found]), join([lse for _, lse in found])


def check(case: SelectCase, dtype: torch.dtype, impl: str | None, device: str = "cpu", backward: bool = True) -> None:
    """Results and gradients are those of the oracle over the tiles that were taken, within twice plain PyTorch's error,
    what float32 sums in another order may be off by, and what gradients are where rowsum(dO * O) is of an output as far
    off as plain PyTorch's, in directions drawn at random.
    """
    q, k, v = make_inputs(case, dtype, device)
    arguments = arguments_of(case, device)
    formulas = {name: x for name, x in arguments.items() if name != "sink"}
    selected = tw.select_tiles(q, k, case.select, **formulas)
    kept = kept_of(case, selected)
    o = tw.attention(q, k, v, select=case.select, impl=impl, **arguments)
    assert torch.equal(o, tw.attention(q, k, v, select=selected, impl=impl, **arguments))
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    results: dict[torch.dtype, list[torch.Tensor]] = {}
    for compute in (dtype, torch.float64):
        leaves = [x.detach().to(compute).requires_grad_() for x in (q, k, v)]
        want, lse = oracle(case, leaves[0], leaves[1], leaves[2], kept, compute)
        results[compute] = [want, *torch.autograd.grad(want, leaves, do.to(compute), retain_graph=True)]
    away = do.double() * (results[dtype][0].double() - want)
    recomputed = [0.0, 0.0, 0.0, 0.0]
    for _ in range(DRAWS):
        more = (away * torch.randn_like(away).sign()).sum(-1)
        of_scores = torch.autograd.grad(lse, leaves[:2], more, retain_graph=True)  # those of dq and dk
        recomputed[1:3] = [max(x, float(y.abs().max())) for x, y in zip(recomputed[1:3], of_scores, strict=True)]
    found = [o, *(torch.autograd.grad(o, (q, k, v), do) if backward else ())]
    largest = float(torch.cat([x.detach().float().abs().flatten() for x in (q, k, v, do)]).max())
    for name, got, exact, by_hand, again in zip(
        ("o", "dq", "dk", "dv"), found, results[torch.float64], results[dtype], recomputed, strict=False
    ):
        assert got.dtype == dtype
        assert got.isfinite().all()
        unit = torch.finfo(dtype).eps / 2
        floor = (ORDER * 2.0**-24 * (1 + largest) + unit) * max(1.0, float(exact.detach().abs().max()))
        allowed = FACTOR * float((by_hand.double() - exact).detach().abs().max()) + floor + again
        off = float((got.double() - exact).detach().abs().max())
        assert off <= allowed, f"{name} off by {off}, allowed {allowed}"


def check_left_out(dtype: torch.dtype, impl: str | None, device: str = "cpu", quantize: Any = None) -> None:
    """Small weights that are left out change a result by no more than they are in all, and none of them is where `lam`
    is large.
    """
    queries, keys, dim = 128, 4000, 64
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, 2, dim, generator=generator) / 4 for n in (queries, keys, keys))
    q[..., 0] = 4.0
    k[..., 0] = -torch.arange(keys)[:, None] / keys * 20 * dim**0.5 / 4  # scores fall by 20 from the first to the last
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    arguments: dict[str, Any] = {"impl": impl, "quantize": quantize}
    want, want_lse = tw.attention_with_lse(q, k, v, select=tw.Sparge(1.0, -1.0), **arguments)
    same, same_lse = tw.attention_with_lse(q, k, v, select=tw.Sparge(1.0, -1.0, lam=1e4), **arguments)
    unit = torch.finfo(dtype).eps
    assert float((same - want).abs().max()) <= 4 * unit * float(v.abs().max())
    torch.testing.assert_close(same_lse, want_lse, rtol=0.0, atol=2.0**-20 * 64)
    for lam in (4.0, 9.0):
        o, lse = tw.attention_with_lse(q, k, v, select=tw.Sparge(1.0, -1.0, lam=lam), **arguments)
        most = min(1.0, keys * math.exp(-lam))  # of a row's sum
        lost = -torch.expm1((lse - want_lse).double())
        assert float(lost.max()) > 1e-6, "nothing was left out"
        assert float(lost.max()) <= most + 2.0**-16
        off = float((o.double() - want.double()).abs().max())
        assert off <= (2 * most + 8 * unit) * float(v.abs().max())
    o, lse = tw.attention_with_lse(q, k, v, select=tw.Sparge(1.0, -1.0, lam=(4.0, 1e4)), **arguments)
    lost = -torch.expm1((lse - want_lse).double())
    assert float(lost[:, 0].max()) > 1e-6, "nothing was left out"
    assert torch.equal(o[:, :, 1], same[:, :, 1]), "another head's number"
    grad = q.clone().requires_grad_()
    o = tw.attention(grad, k, v, select=tw.Sparge(1.0, -1.0, lam=4.0), **arguments)
    whole = tw.attention(grad, k, v, select=tw.Sparge(1.0, -1.0), **arguments)
    assert torch.equal(o, whole)  # whoever wants gradients has all
