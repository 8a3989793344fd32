"""Formulas that only add to scores, by PyTorch's fused CPU kernel with a bias, a block of queries at a time.

A block of queries meets one run of keys: from the first to the last that its mask shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.formula.structure import Bound
from tilewise.ops.attention.cpu_bias import Bias, only_adds, plain_causal
from tilewise.ops.attention.gradient import Gradients
from tilewise.ops.attention.problem import Call
from tilewise.schedule.tilemap import EMPTY, classify

FEWEST = 2**15  # pairs of a sequence, below which a call of the kernel costs more than it saves
BLOCK_M, BLOCK_N = 256, 128  # mask tiles are classified in these
WORTH = 2.0  # how many pairs the kernel does in the time in which the tiled form does one
NEGLIGIBLE = 60.0  # weights below exp(-60) are 0 in the backward: smaller ones would become subnormal, which is slow
FAR = 2.0**10  # of a log-sum: beyond, its rounding shows in weights that are counted from it
SHORTEST = 16  # keys: in shorter runs the kernel's maximum loses NaN
LARGEST = 1e37  # of a log-sum: beyond, a formula's score may count as hidden
_PASSES = ((768, 1.0), (192, 1.3), (0, 1.7))  # the kernel's time for a pair, by queries in a call: it splits few finely


@dataclass(frozen=True)
class Block:
    """Queries that are computed in one call of the kernel, and the run of keys that they meet."""

    rows: slice
    keys: slice


def serves(call: Call) -> bool:
    """Whether the kernel can compute a dense call, by what is known without looking at numbers."""
    return (
        call.q.dtype == torch.float32
        and call.head_dim == call.head_dim_v > 0
        and call.dropout == 0.0
        and call.skip is None
        and not call.batch_invariant
        and call.rows_k >= SHORTEST
        and call.rows_q * call.rows_k >= FEWEST
        and (call.score is None or only_adds(call.score.text))
    )


def blocks_of(call: Call) -> list[Block] | None:
    """The blocks of a call, each with what pairs it costs least to compute; None where the tiled form is faster."""
    if call.mask is None or plain_causal(call):
        return [Block(slice(0, call.rows_q), slice(0, call.rows_k))]
    sizes = _Sizes(call.rows_q, call.rows_k, call.batch, call.num_heads_q, call.first_batch)
    return _blocks_of_any(call.mask, sizes) if call.mask.tensors else _blocks_without_tensors(call.mask, sizes)


def forward(call: Call, blocks: list[Block], o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Write o (batch, rows, heads, dim) and lse (batch, heads, rows) of a dense call.

    Returns:
        bool (batch, heads, rows), the rows that the kernel cannot compute: those that meet an infinity or NaN.
    """
    bias = Bias(call)
    doubtful = torch.zeros(lse.shape, dtype=torch.bool, device="cpu")
    for block in blocks:
        for heads, heads_kv in bias.few_heads(block.rows, block.keys):
            o_block, lse_block = o[:, block.rows, heads], lse[:, heads, block.rows]
            if block.keys.stop == block.keys.start:
                o_block.zero_(), lse_block.fill_(-torch.inf)
                continue
            added = bias.of(block.rows, block.keys, heads)
            q = _heads_first(bias.ordered(call.q[:, block.rows, heads], 1))
            k, v = (_heads_first(x[:, block.keys, heads_kv]) for x in (call.k, call.v))
            found_o, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, bias.causal, attn_mask=added, scale=call.scale
            )
            zero = (found_lse == 0.0) & (found_o == 0.0).all(-1) if bool((found_lse == 0.0).any()) else None
            if zero is not None:  # as PyTorch has it where each score is -inf, but others may be 0, too
                unseen = zero & (added.amax(-1) == -torch.inf) if added is not None else torch.zeros_like(zero)
                found_lse = torch.where(unseen, -torch.inf, found_lse)
                doubtful[:, heads, block.rows] |= bias.ordered(zero & ~unseen, 2)
            o_block.copy_(bias.ordered(found_o.transpose(1, 2), 1))
            lse_block.copy_(bias.ordered(found_lse, 2))
    if call.sink is not None:
        add_sink(call.sink, o, lse)
    if not _finite(o):
        doubtful |= ~o.isfinite().all(-1).transpose(1, 2)
    return doubtful.logical_or_(~(lse.abs() < LARGEST) & (lse != -torch.inf))


def steady(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """bool (batch,): elements whose weights the kernel's backward can count from lse."""
    good = ((lse.abs() <= FAR) | (lse == -torch.inf)).flatten(1).all(-1)
    return good if _finite(o) else good & o.isfinite().flatten(1).all(-1)


def backward(
    call: Call, blocks: list[Block], o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, grads: Gradients
) -> None:
    """Write dq, and add to dk and dv; lse has the sink in it, and no gradient."""
    bias = Bias(call)
    bias.hide_below(_negligible(call, lse))
    lse = torch.where(lse == -torch.inf, 0.0, lse)  # as the kernel has it
    for block in blocks:
        if block.keys.stop == block.keys.start:
            continue
        for heads, heads_kv in bias.few_heads(block.rows, block.keys):
            rows = [_heads_first(bias.ordered(x[:, block.rows, heads], 1)) for x in (do, call.q, o)]
            k, v = (_heads_first(x[:, block.keys, heads_kv]) for x in (call.k, call.v))
            if call.group > 1:
                k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                rows[0],
                rows[1],
                k,
                v,
                rows[2],
                bias.ordered(lse[:, heads, block.rows], 2).contiguous(),
                0.0,
                bias.causal,
                attn_mask=bias.of(block.rows, block.keys, heads),
                scale=call.scale,
            )
            if call.group > 1:
                dk, dv = (x.unflatten(1, (-1, call.group)).sum(2) for x in (dk, dv))
            grads.dq[:, block.rows, heads] = bias.ordered(dq, 2).transpose(1, 2)
            grads.dk[:, block.keys, heads_kv] += dk.transpose(1, 2)
            grads.dv[:, block.keys, heads_kv] += dv.transpose(1, 2)


# blocks ------------------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """What a mask's tiles depend on, besides the mask."""

    rows_q: int
    rows_k: int
    batch: int
    heads: int
    first_batch: int


def _blocks_of_any(mask: Bound, sizes: _Sizes) -> list[Block] | None:
    classes = classify(
        mask,
        seqlen_q=sizes.rows_q,
        seqlen_k=sizes.rows_k,
        batch=sizes.batch,
        heads=sizes.heads,
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        first_batch=sizes.first_batch,
    )
    met = [[n for n, seen in enumerate(row) if seen] for row in (classes != EMPTY).any(0).any(0).tolist()]
    runs = [(row[0], row[-1] + 1) if row else None for row in met]
    found, least = None, WORTH * sum(map(len, met)) * BLOCK_M * BLOCK_N
    tiles = 1
    while True:
        blocks = list(_blocks(runs, sizes, tiles))
        cost = sum(map(_cost, blocks))
        if cost <= least:
            found, least = blocks, cost
        if tiles >= len(runs):
            return found
        tiles *= 2


# its mask has no tensors, whose values could change
_blocks_without_tensors = functools.lru_cache(maxsize=256)(_blocks_of_any)


def _blocks(runs: list[tuple[int, int] | None], sizes: _Sizes, tiles: int) -> Iterator[Block]:
    """Blocks of so many tiles of queries; `runs` say which tiles of keys a tile of queries meets."""
    for first in range(0, len(runs), tiles):
        met = [run for run in runs[first : first + tiles] if run is not None]
        rows = slice(first * BLOCK_M, min((first + tiles) * BLOCK_M, sizes.rows_q))
        end = min(max((stop for _, stop in met), default=0) * BLOCK_N, sizes.rows_k)
        keys = slice(min((start for start, _ in met), default=0) * BLOCK_N, end)
        if met and keys.stop - keys.start < SHORTEST:  # the last tile, cut off
            keys = slice(keys.stop - SHORTEST, keys.stop)
        yield Block(rows, keys)


def _cost(block: Block) -> float:
    rows = block.rows.stop - block.rows.start
    pairs: int = rows * (block.keys.stop - block.keys.start)
    return pairs * next(cost for least, cost in _PASSES if rows >= least)


def _negligible(call: Call, lse: torch.Tensor) -> torch.Tensor:
    """(batch, heads): below this bias each weight is below exp(-NEGLIGIBLE), as |s| <= scale * |q| * |k|."""
    q, k = (torch.linalg.vector_norm(x, dim=-1).amax(1) for x in (call.q, call.k))
    least = torch.where(lse == -torch.inf, torch.inf, lse).amin(-1)
    most: torch.Tensor = abs(call.scale) * q * k.repeat_interleave(call.group, 1)
    return least - most - NEGLIGIBLE


def _finite(x: torch.Tensor) -> bool:
    """False where a number is infinite or NaN: a sum is a hundred times as fast as looking at each."""
    return math.isfinite(float(x.sum()))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, dim) of (batch, rows, heads, dim), as a matrix product of the kernel can read it."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def add_sink(sink: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Take the sink's share from rows o (batch, rows, heads, dim): o * exp(lse - lse_with_sink)."""
    with_sink = torch.logaddexp(lse, sink.detach().to(lse.dtype)[None, :, None])
    share = torch.where(with_sink == -torch.inf, 1.0, torch.exp(lse - with_sink))
    o.mul_(share.transpose(1, 2)[..., None])
    lse.copy_(with_sink)
