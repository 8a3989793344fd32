"""Cases of the interfaces of others that take tiles: FastVideo's videos and blocks, SpargeAttn's selections."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch

from tilewise.adapters import fastvideo, spas_sage_attn
from tools.fuzz import placed as places
from tools.fuzz.attention import Problem
from tools.fuzz.case import UNIT, Case, Tensors, largest
from tools.fuzz.draw import HALVES, Draw
from tools.fuzz.exact import Rules, attend, stacked
from tools.fuzz.formulas import Formula, Visible
from tools.fuzz.placed import Heads, Placed

NO_FORMULA = Formula(None, ())


def _in_rows(draw: Draw, sizes: Heads, dtype: torch.dtype, rows: int, keys: int) -> Placed:
    """One or two batch elements of so many queries and keys."""
    batch = draw.one((1, 1, 2))
    return places.in_rows(draw, sizes, dtype, (batch, rows, keys), ("plain", "heads first", "padded"))


def _problem(draw: Draw, dtype: torch.dtype, sizes: Heads, placed: Placed, rules: Rules, more: Tensors) -> Problem:
    return Problem(draw, dtype, sizes, placed, NO_FORMULA, rules, placed.inputs | more, {})


def _heads_first(x: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x["q"].transpose(1, 2), x["k"].transpose(1, 2), x["v"].transpose(1, 2)


def sliding_tiles(draw: Draw) -> Case:
    """sliding_tile_attention: tiles of a video that a query's tile has near, and text behind."""
    dtype, sizes = draw.dtype(), places.heads(draw)
    tile = draw.kernel(((2, 2, 3), (1, 4, 4), (3, 2, 1)))
    canvas = tuple(draw.one((1, side, side + 1, 2 * side, 3 * side)) for side in tile)
    words = draw.one((0, 0, 7, 20))
    windows = [tuple(draw.one((1, 1, 2, 3, 5)) for _ in range(3)) for _ in range(sizes.q)]
    tokens = math.prod(canvas)
    placed = _in_rows(draw, sizes, dtype, tokens + words, tokens + words)
    batch = len(placed.lengths)
    valid = [draw.one(range(words + 1)) for _ in range(batch)]
    each = draw.kernel_chance(0.5)
    valid = valid if each else valid[:1] * batch
    more = {"near": _near(canvas, tile, windows, words).to(draw.device)} | ({"valid": draw.ints(valid)} if each else {})
    rules = Rules(sizes.dim**-0.5, lambda c, b, h, i, j: c["near"][h, i, j] & (j < tokens + valid[int(b)]))
    made = _problem(draw, dtype, sizes, placed, rules, more)

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        shape, text = "x".join(map(str, canvas)), x["valid"] if each else valid[0]
        o = fastvideo.sliding_tile_attention(*_heads_first(x), windows, text, bool(words), shape, tile_size=tile)
        return {"o": o.transpose(1, 2)}

    leaves = ("q", "k", "v") if draw.kernel_chance(0.4) else ()
    text = f"video {canvas} in tiles {tile}, windows {windows}, {valid} of {words} words {made.text}"
    return made.case(library, plain=lambda x: {"o": made.plain(x)["o"]}, leaves=leaves, into=("o",), text=text)


def _near(canvas: Any, tile: Any, windows: list[Any], words: int) -> torch.Tensor:
    """Bool (heads, tokens, tokens): whether a query's window, moved inside at the border, has a key's tile."""
    grid = [-(-side // own) for side, own in zip(canvas, tile, strict=True)]
    there = list(itertools.product(*map(range, grid)))
    owner = sorted(
        there.index(tuple(x // own for x, own in zip(place, tile, strict=True)))
        for place in itertools.product(*map(range, canvas))
    )
    where = torch.tensor(there)[owner]  # of each token's tile, (tokens, 3)
    found = torch.ones(len(windows), len(owner) + words, len(owner) + words, dtype=torch.bool)
    for head, window in enumerate(windows):
        for axis, (width, count) in enumerate(zip(window, grid, strict=True)):
            if width | 1 >= count:
                continue
            reach = width // 2
            middle = where[:, axis].clamp(reach, count - 1 - reach)
            near = (where[None, :, axis] - middle[:, None]).abs() <= reach
            found[head, : len(owner), : len(owner)] &= near
    return found


def _padded(draw: Draw, blocks: int, size: int, empty: bool) -> list[int]:
    """How many tokens of each block are no padding."""
    return [draw.one((size, size, 1, size // 2 + 1, 0 if empty else 1)) for _ in range(blocks)]


def video_blocks(draw: Draw) -> Case:
    """block_sparse_attn of a map of blocks, and video_sparse_attn, which finds one by means of blocks."""
    dtype, sizes = draw.dtype(), places.heads(draw)
    size, counts = draw.kernel((4, 16, 64)), (draw.one((1, 2, 3)), draw.one((1, 2, 4)))
    found = draw.kernel((True, False))
    placed = _in_rows(draw, sizes, dtype, counts[0] * size, counts[1] * size)
    batch = len(placed.lengths)
    of_q, of_k = (_padded(draw, blocks, size, empty=not found) for blocks in counts)
    if found:  # blocks are filled up with zeros
        for name, own in (("q", of_q), ("k", of_k), ("v", of_k)):
            for block, count in enumerate(own):
                placed.inputs[name][:, block * size + count : (block + 1) * size] = 0.0
    topk = draw.one(range(1, counts[1] + 1))
    more = {"of q": draw.ints(of_q), "of k": draw.ints(of_k)}
    taken = _taken(placed.inputs, size, topk, of_q, of_k) if found else None
    if taken is None:
        taken, topk = draw.flags(0.5, batch, sizes.q, *counts), 0 if found else topk
        found = False
    if not found:
        more["map"] = taken
    if found and draw.kernel_chance(0.5):
        more["weight"] = draw.normal(batch, sizes.q, counts[0] * size, draw.one((1, sizes.dim_v)), dtype=dtype)
    made = _problem(draw, dtype, sizes, placed, Rules(sizes.dim**-0.5, _in_blocks(taken, size, of_k), shift=0), more)

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        q, k, v = _heads_first(x)
        if not found:
            o, lse = fastvideo.block_sparse_attn(q, k, v, x["map"], x["of k"])
            return {"o": o.transpose(1, 2), "lse": lse}
        o = fastvideo.video_sparse_attn(q, k, v, x["of k"], x["of q"], topk, size, x.get("weight"))
        return {"o": o.transpose(1, 2)}

    def plain(x: Tensors) -> Tensors:
        fine = made.plain(x)
        if not found:
            return fine
        means = [_means(x[name], size, own) for name, own in (("q", of_q), ("k", of_k), ("v", of_k))]
        rules = Rules(sizes.dim**-0.5, shift=0)
        parts = [attend(q, k, v, rules, b, x) for b, (q, k, v) in enumerate(zip(*means, strict=True))]
        spread = stacked(parts, packed=False)["o"].repeat_interleave(size, 1)
        weight = x["weight"].transpose(1, 2) if "weight" in x else 1.0
        return {"o": fine["o"] + (spread * weight).to(fine["o"].dtype)}

    def floor(name: str, truth: Tensors) -> float:
        """Means are rounded, and so is each of two parts."""
        more = 4 * UNIT[dtype] * (1 + largest(truth[name])) if found else 0.0
        return made.floor(name, truth) + more * (1.0 if name == "o" else 4.0)

    into = ("o",) if found else draw.one((("o",), ("o", "lse")))
    leaves = ("q", "k", "v", *(["weight"] if "weight" in more else ())) if draw.kernel_chance(0.4) else ()
    text = f"blocks of {size}, of q {of_q}, of k {of_k}, {f'the best {topk}' if found else 'given'} {made.text}"
    return made.case(library, plain=plain, leaves=leaves, into=into, floor=floor, text=text)


def _means(x: torch.Tensor, size: int, own: list[int]) -> torch.Tensor:
    """(batch, blocks, heads, dim), of the tokens that are no padding; that is of zeros, and gets gradients, too."""
    parts = [x[:, n * size : (n + 1) * size].sum(1) / count for n, count in enumerate(own)]
    return torch.stack(parts, 1)


def _taken(inputs: Tensors, size: int, topk: int, of_q: list[int], of_k: list[int]) -> torch.Tensor | None:
    """The blocks whose means score best, bool (batch, heads, blocks, blocks); None where two are so near that roundings
    decide.
    """
    q, k = (_means(inputs[name].double(), size, own).transpose(1, 2) for name, own in (("q", of_q), ("k", of_k)))
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    order = s.sort(-1, descending=True)
    if topk < s.shape[-1]:
        gap = order.values[..., topk - 1] - order.values[..., topk]
        if float(gap.min()) <= 2.0**-16 * (1 + largest(s)):
            return None
    return torch.zeros_like(s, dtype=torch.bool).scatter_(-1, order.indices[..., :topk], True)


def _in_blocks(taken: torch.Tensor, size: int | tuple[int, int], own: list[int] | None) -> Visible:
    """Pairs of blocks that are taken, but for padding."""
    rows, columns = (size, size) if isinstance(size, int) else size

    def visible(c: Tensors, b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = taken[int(b), h, i // rows, j // columns]
        return seen if own is None else seen & (j % columns < torch.tensor(own, device=j.device)[j // columns])

    return visible


SPARGE = (
    spas_sage_attn.spas_sage2_attn_meansim_cuda,
    spas_sage_attn.spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn.spas_sage_attn_meansim_cuda,
    spas_sage_attn.spas_sage_attn_meansim_topk_cuda,
)


def sparge(draw: Draw) -> Case:
    """SpargeAttn's functions where it is known which tiles they take: all, or those that are given."""
    dtype, sizes = draw.kernel(HALVES), places.heads(draw)
    sizes = replace(sizes, dim=min(256, sizes.dim), dim_v=min(256, sizes.dim_v))
    rows, keys = draw.length(), draw.length()
    placed = _in_rows(draw, sizes, dtype, rows, keys)
    batch, factor = len(placed.lengths), draw.kernel((1.0, 0.5)) * sizes.dim**-0.5
    given: dict[str, Any] = {"scale": factor, "tensor_layout": draw.kernel(("HND", "NHD")), "return_lse": True}
    given |= {"smooth_k": draw.kernel((True, False)), "attention_sink": draw.chance(0.3)}
    own, causal = draw.kernel_chance(0.5), draw.kernel((True, False))
    more: Tensors = {}
    run: Any
    if own:
        tile = draw.kernel(((128, 64), (64, 128), (128, 128)))
        more["map"] = draw.flags(0.6, batch, sizes.q, -(-rows // tile[0]), -(-keys // tile[1]))
        seen = more["map"].clone()
        seen[..., :1] |= given["attention_sink"]
        first = next(size for size in ((128, 64), (64, 128), (128, 128)) if _fits(seen, size, rows, keys))
        visible: Visible | None = _in_blocks(seen, first, None)
        run = spas_sage_attn.block_sparse_sage2_attn_cuda
    else:
        run = draw.kernel(SPARGE)
        given |= {"topk": 1.0} if "topk" in run.__name__ else {"cdfthreshd": 1.0}
        given |= {"simthreshd1": draw.one((-1.0, 0.6)), "is_causal": causal}
        visible = (lambda c, b, h, i, j: j <= i) if causal else None
    made = _problem(draw, dtype, sizes, placed, Rules(factor, visible, shift=0), more)

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        heads_first = given["tensor_layout"] == "HND"
        qkv = _heads_first(x) if heads_first else (x["q"], x["k"], x["v"])
        o, lse = run(*qkv, x["map"], **given) if own else run(*qkv, **given)
        return {"o": o.transpose(1, 2) if heads_first else o, "lse": lse}

    return made.case(
        library,
        rough=lambda x: made.by(x, {"q": 127, "k": 127, "v": 16}),
        floor=lambda name, truth: 0.04 * (1 + largest(truth[name])),
        text=f"{run.__name__} {given} {made.text}",
    )


def _fits(seen: torch.Tensor, size: tuple[int, int], rows: int, keys: int) -> bool:
    """Whether tiles of this size are as many."""
    return tuple(seen.shape[2:]) == (-(-rows // size[0]), -(-keys // size[1]))
