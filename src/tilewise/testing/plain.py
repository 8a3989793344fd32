"""The library's masks and scores as plain functions of index tensors: an independent spelling, sharing no code with it.

Every function here returns `mask(b, h, i, j)` or `score(s, b, h, i, j)` for PyTorch tensors that broadcast. `i` is the
query's place on the key axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Function = Callable[..., torch.Tensor]


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Key j is not after query i."""
    return j <= i


def window(left: int | None, right: int | None = 0) -> Function:
    """i - left < j <= i + right."""

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = torch.ones_like(i + j, dtype=torch.bool)
        if left is not None:
            near = near & (j > i - left)
        return near if right is None else near & (j <= i + right)

    return visible


def chunked(size: int) -> Function:
    """i and j in the same run of `size` positions."""
    return lambda b, h, i, j: torch.div(i, size, rounding_mode="floor") == torch.div(j, size, rounding_mode="floor")


def prefix(lengths: torch.Tensor) -> Function:
    """Keys before lengths[b]."""
    return lambda b, h, i, j: j < lengths[b]


def document(ids: torch.Tensor) -> Function:
    """Equal ids; ids (seqlen,) or (batch, seqlen)."""
    if ids.ndim == 1:
        return lambda b, h, i, j: ids[i] == ids[j]
    return lambda b, h, i, j: ids[b, i] == ids[b, j]


def tree(parents: Sequence[int], device: torch.device) -> Function:
    """j is i or an ancestor of i, found by walking up."""
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool, device=device)
    for node in range(len(parents)):
        above = node
        while above >= 0:
            ancestors[node, above] = True
            above = parents[above]
    return lambda b, h, i, j: ancestors[i, j]


def dilated(step: int) -> Function:
    """i and j a multiple of `step` apart."""
    return lambda b, h, i, j: torch.remainder(i - j, step) == 0


def neighborhood(
    shape: Sequence[int],
    window: Sequence[int],
    device: torch.device,
    *,
    stride: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
) -> Function:
    """For each query and axis the neighbours one by one: NATTEN's rules, walked over places of the same remainder."""
    axes = []
    for axis, (size, width) in enumerate(zip(shape, window, strict=True)):
        group, step = stride[axis] if stride else 1, dilation[axis] if dilation else 1
        seen: list[set[int]] = [set() for _ in range(size)]
        for rest in range(step):
            line = list(range(rest, size, step))
            for place, x in enumerate(line):
                members = [p for p in range(len(line)) if p // group == place // group]
                if causal and causal[axis]:
                    first = members[-1] - width + 1
                    seen[x] = {line[p] for p in range(len(line)) if first <= p <= place}
                    continue
                middle = place - place % group + group // 2  # of a whole group, also where the last one is cut
                start = middle - width // 2
                while start + width > len(line):
                    start -= 1
                while start < 0:
                    start += 1
                seen[x] = set(line[start : start + width])
        axes.append(seen)
    places = list(itertools.product(*map(range, shape)))
    return _pairs([[all(k in axes[a][q] for a, (q, k) in enumerate(zip(one, other, strict=True)))
                    for other in places] for one in places], device)  # fmt: skip


def sliding_tile(
    canvas: Sequence[int],
    tile: Sequence[int],
    windows: Sequence[Sequence[tuple[int, int]]],
    places: Sequence[int],
    device: torch.device,
    *,
    text: int = 0,
    text_first: bool = False,
    causal: bool = False,
) -> Function:
    """For each head a window of tiles, (before, after) along each axis, walked tile by tile and shifted inside.

    `places` lists for each place of the sequence without text its place in raster order.
    """
    coordinates = list(itertools.product(*map(range, canvas)))
    heads = []
    for window in windows:
        seen: list[list[list[int]]] = []
        for axis, (before, after) in enumerate(window):
            count = -(-canvas[axis] // tile[axis])
            seen.append([])
            for own in range(count):
                near = list(range(own - before, own + after + 1))
                if causal and axis == 0:
                    near = [place for place in near if 0 <= place <= own]
                while near[0] < 0:
                    near = [place + 1 for place in near]
                while near[-1] >= count:
                    near = [place - 1 for place in near]
                seen[axis].append(near)
        rows = []
        for query in places:
            at = [x // extent for x, extent in zip(coordinates[query], tile, strict=True)]
            row = [all(x // tile[axis] in seen[axis][at[axis]] for axis, x in enumerate(coordinates[key]))
                   for key in places]  # fmt: skip
            rows.append([True] * text + row if text_first else row + [True] * text)
        words = [[True] * (len(places) + text) for _ in range(text)]
        heads.append(words + rows if text_first else rows + words)
    return _pairs(heads, device)


def _pairs(visible: list[list[bool]] | list[list[list[bool]]], device: torch.device) -> Function:
    """A table (queries, keys) or (heads, queries, keys) as a function; beyond it nothing is asked."""
    near = torch.tensor(visible, device=device)
    return (lambda b, h, i, j: near[i, j]) if near.ndim == 2 else (lambda b, h, i, j: near[h % len(near), i, j])


def blocks(visible: torch.Tensor, block_size: int) -> Function:
    """The block map blown up to positions; `visible` as `tilewise.blocks` takes it."""
    full = visible.repeat_interleave(block_size, -2).repeat_interleave(block_size, -1)
    full = full[(None,) * (4 - full.ndim)]
    return lambda b, h, i, j: full[b % full.shape[0], h % full.shape[1], i, j]


def table(values: torch.Tensor) -> Function:
    """values[b, h, query, key] of a (1 or batch, 1 or heads, seqlen_q, seqlen_k) or (seqlen_q, seqlen_k) tensor."""
    full = values[(None,) * (4 - values.ndim)]
    shift = full.shape[-1] - full.shape[-2]
    return lambda b, h, i, j: full[b % full.shape[0], h % full.shape[1], i - shift, j]


def alibi(slopes: torch.Tensor) -> Function:
    """s - slope |i - j|."""

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return s - slope * torch.abs(i - j).to(slope.dtype)

    return score


def softcap(cap: float) -> Function:
    """cap tanh(s / cap)."""
    return lambda s, b, h, i, j: cap * torch.tanh(s / cap)


def relative_bias(values: torch.Tensor, *, bidirectional: bool, max_distance: int) -> Function:
    """T5's buckets as in Hugging Face transformers' `T5Attention._relative_position_bucket`, then values[bucket, h]."""

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        relative, num_buckets = j - i, values.shape[0]
        offset = torch.zeros_like(relative)
        if bidirectional:
            num_buckets //= 2
            offset = (relative > 0).long() * num_buckets
            relative = relative.abs()
        else:
            relative = -torch.minimum(relative, torch.zeros_like(relative))
        exact = num_buckets // 2
        ratio = torch.log(relative.clamp(min=1).float() / exact) / math.log(max_distance / exact)
        large = torch.clamp(exact + (ratio * (num_buckets - exact)).long(), max=num_buckets - 1)
        bucket = offset + torch.where(relative < exact, relative, large)
        return s + values[bucket, h]

    return score


def added(values: Function) -> Function:
    """s + values(b, h, i, j)."""
    return lambda s, b, h, i, j: s + values(b, h, i, j)


def then(first: Function, second: Function) -> Function:
    """second(first(s))."""
    return lambda s, b, h, i, j: second(first(s, b, h, i, j), b, h, i, j)


def both(one: Function, other: Function) -> Function:
    """one & other."""
    return lambda b, h, i, j: one(b, h, i, j) & other(b, h, i, j)


def either(one: Function, other: Function) -> Function:
    """one | other."""
    return lambda b, h, i, j: one(b, h, i, j) | other(b, h, i, j)


def opposite(one: Function) -> Function:
    """~one."""
    return lambda b, h, i, j: ~one(b, h, i, j)
