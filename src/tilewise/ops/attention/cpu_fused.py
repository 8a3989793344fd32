"""Formulas that only add to scores, by PyTorch's fused CPU kernel with a bias, a block of queries at a time.

A block of queries meets one run of keys: from the first to the last that its mask shows. The bias holds what the score
formula adds, and -inf where the mask hides. Where it depends on i - j alone, as ALiBi's and windows' do, one row of
numbers is all of it: with the queries in descending order, the entry of query u and key j lies at u + j.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr
from tilewise.formula.optimize import written_once
from tilewise.formula.structure import Bound, parse
from tilewise.formula.walk import postorder, symbols
from tilewise.ops.attention.cpu_parts import fill
from tilewise.ops.attention.gradient import Gradients
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.variant import CAUSAL
from tilewise.schedule.tilemap import EMPTY, classify

FEWEST = 2**15  # pairs of a sequence, below which a call of the kernel costs more than it saves
BLOCK_M, BLOCK_N = 256, 128  # mask tiles are classified in these
BIAS = 2**21  # numbers of a bias made at a time: 8 MiB
WORTH = 2.0  # how many pairs the kernel does in the time in which the tiled form does one
FAR = 2.0**10  # of a log-sum: beyond, its rounding shows in weights that are counted from it
_SHORTEST = 16  # keys: in shorter runs the kernel's maximum loses NaN
_LARGEST = 1e37  # of a log-sum: beyond, a formula's score may count as hidden
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
        and call.rows_k >= _SHORTEST
        and call.rows_q * call.rows_k >= FEWEST
        and (call.score is None or _only_adds(call.score.text))
    )


def blocks_of(call: Call) -> list[Block] | None:
    """The blocks of a call, each with what pairs it costs least to compute; None where the tiled form is faster."""
    if call.mask is None or _plain_causal(call):
        return [Block(slice(0, call.rows_q), slice(0, call.rows_k))]
    classes = classify(
        call.mask,
        seqlen_q=call.rows_q,
        seqlen_k=call.rows_k,
        batch=call.batch,
        heads=call.num_heads_q,
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        first_batch=call.first_batch,
    )
    visited = (classes != EMPTY).any(0).any(0)
    found, least = None, WORTH * float(visited.sum()) * BLOCK_M * BLOCK_N
    tiles = 1
    while True:
        blocks = list(_blocks(call, visited, tiles))
        cost = sum(_cost(block) for block in blocks)
        if cost <= least:
            found, least = blocks, cost
        if tiles >= len(visited):
            return found
        tiles *= 2


def forward(call: Call, blocks: list[Block], o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Write o (batch, rows, heads, dim) and lse (batch, heads, rows) of a dense call.

    Returns:
        bool (batch, heads, rows), the rows that the kernel cannot compute: those that meet an infinity or NaN.
    """
    bias = _Bias(call)
    doubtful = torch.zeros(lse.shape, dtype=torch.bool, device="cpu")
    for block in blocks:
        for heads, heads_kv in bias.few_heads(block):
            o_block, lse_block = o[:, block.rows, heads], lse[:, heads, block.rows]
            if block.keys.stop == block.keys.start:
                o_block.zero_(), lse_block.fill_(-torch.inf)
                continue
            added = bias.of(block, heads)
            q = bias.ordered(_rows(call.q, block.rows, heads), -2)
            k, v = _rows(call.k, block.keys, heads_kv), _rows(call.v, block.keys, heads_kv)
            found_o, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, bias.causal, attn_mask=added, scale=call.scale
            )
            zero = (found_lse == 0.0) & (found_o == 0.0).all(-1) if bool((found_lse == 0.0).any()) else None
            if zero is not None:  # as PyTorch has it where each score is -inf, but others may be 0, too
                unseen = zero & (added.amax(-1) == -torch.inf) if added is not None else torch.zeros_like(zero)
                found_lse = torch.where(unseen, -torch.inf, found_lse)
                doubtful[:, heads, block.rows] |= bias.ordered(zero & ~unseen, -1)
            o_block.copy_(bias.ordered(found_o, -2).transpose(1, 2))
            lse_block.copy_(bias.ordered(found_lse, -1))
    if call.sink is not None:
        _add_sink(call.sink, o, lse)
    if not math.isfinite(float(o.sum())):
        doubtful |= ~o.isfinite().all(-1).transpose(1, 2)
    return doubtful.logical_or_(~(lse.abs() < _LARGEST) & (lse != -torch.inf))


def steady(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """bool (batch,): elements whose weights the kernel's backward can count from lse."""
    rows = (lse.abs() <= FAR) | (lse == -torch.inf)
    return rows.all(-1).all(-1) & o.isfinite().flatten(1).all(-1)


def backward(
    call: Call, blocks: list[Block], o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, grads: Gradients
) -> None:
    """Write dq, and add to dk and dv; lse has the sink in it, and no gradient."""
    bias = _Bias(call)
    lse = torch.where(lse == -torch.inf, 0.0, lse)  # as the kernel has it
    for block in blocks:
        if block.keys.stop == block.keys.start:
            continue
        for heads, heads_kv in bias.few_heads(block):
            rows = [bias.ordered(_rows(x, block.rows, heads), -2) for x in (do, call.q, o)]
            k, v = (_rows(x, block.keys, heads_kv).repeat_interleave(call.group, 1) if call.group > 1
                    else _rows(x, block.keys, heads_kv) for x in (call.k, call.v))  # fmt: skip
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                rows[0],
                rows[1],
                k,
                v,
                rows[2],
                bias.ordered(lse[:, heads, block.rows], -1).contiguous(),
                0.0,
                bias.causal,
                attn_mask=bias.of(block, heads),
                scale=call.scale,
            )
            if call.group > 1:
                dk, dv = (x.unflatten(1, (-1, call.group)).sum(2) for x in (dk, dv))
            grads.dq[:, block.rows, heads] = bias.ordered(dq, -2).transpose(1, 2)
            grads.dk[:, block.keys, heads_kv] += dk.transpose(1, 2)
            grads.dv[:, block.keys, heads_kv] += dv.transpose(1, 2)


# blocks ------------------------------------------------------------------------------------------------------------


def _blocks(call: Call, visited: torch.Tensor, tiles: int) -> Iterator[Block]:
    """Blocks of so many tiles of queries; `visited` is bool (query tiles, key tiles)."""
    for first in range(0, len(visited), tiles):
        met = visited[first : first + tiles].any(0).nonzero().flatten().tolist()
        rows = slice(first * BLOCK_M, min((first + tiles) * BLOCK_M, call.rows_q))
        keys = slice(met[0] * BLOCK_N, min((met[-1] + 1) * BLOCK_N, call.rows_k)) if met else slice(0, 0)
        if met and keys.stop - keys.start < _SHORTEST:  # the last tile, cut off
            keys = slice(keys.stop - _SHORTEST, keys.stop)
        yield Block(rows, keys)


def _cost(block: Block) -> float:
    rows = block.rows.stop - block.rows.start
    return rows * (block.keys.stop - block.keys.start) * next(cost for least, cost in _PASSES if rows >= least)


def _plain_causal(call: Call) -> bool:
    """Whether the kernel's own causal mask is all."""
    return call.mask is not None and call.mask.text == CAUSAL and call.score is None and call.rows_q == call.rows_k


def _rows(x: torch.Tensor, rows: slice, heads: slice) -> torch.Tensor:
    """(batch, heads, rows, dim) of (batch, rows, heads, dim), as a matrix product of the kernel can read it."""
    x = x[:, rows, heads].transpose(1, 2)
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _add_sink(sink: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Take the sink's share from rows: o * exp(lse - lse_with_sink)."""
    with_sink = torch.logaddexp(lse, sink.detach().to(lse.dtype)[None, :, None])
    share = torch.where(with_sink == -torch.inf, 1.0, torch.exp(lse - with_sink))
    o.mul_(share.transpose(1, 2)[..., None])
    lse.copy_(with_sink)


# bias --------------------------------------------------------------------------------------------------------------


class _Bias:
    """What a call's formula adds to scores, by block."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.shift = call.rows_k - call.rows_q
        self.causal = _plain_causal(call)
        self.mask = None if call.mask is None or self.causal else written_once(call.mask.structure.root)
        roots = [root for root in (self.mask, call.score and call.score.structure.root) if root is not None]
        used: set[str] = set().union(*map(symbols, roots))
        self.by_batch, self.by_head = "b" in used, "h" in used
        self.line: torch.Tensor | None = None
        if roots and all(map(_of_distance, roots)):
            u = torch.arange(call.rows_q + call.rows_k - 1, device="cpu")
            behind = (call.rows_q - 1 - u).clamp(min=0)  # each difference once: from the last query on key 0, then
            self.line = self._values(behind[None] + self.shift, u + behind - (call.rows_q - 1), slice(None))
        self.empty = not roots

    def ordered(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """`x` with its dimension of queries in the order of the bias, or back."""
        return x if self.line is None else x.flip(rows)

    def few_heads(self, block: Block) -> Iterator[tuple[slice, slice]]:
        """Heads of queries and of keys that are computed together: all, unless their biases would take much memory."""
        call = self.call
        few = call.num_heads_kv
        if self.by_head and self.line is None:
            pairs = (block.rows.stop - block.rows.start) * max(1, block.keys.stop - block.keys.start)
            few = max(1, BIAS // (pairs * call.group * (call.batch if self.by_batch else 1)))
        for first in range(0, call.num_heads_kv, few):
            heads_kv = slice(first, min(first + few, call.num_heads_kv))
            yield slice(first * call.group, heads_kv.stop * call.group), heads_kv

    def of(self, block: Block, heads: slice) -> torch.Tensor | None:
        """(batch or 1, heads or 1, rows, keys), in the order of `ordered`."""
        if self.empty:
            return None
        rows, keys = block.rows, block.keys
        if self.line is None:
            i = torch.arange(rows.start, rows.stop, device="cpu")[:, None] + self.shift
            return self._values(i, torch.arange(keys.start, keys.stop, device="cpu"), heads)
        line = self.line if self.line.shape[1] == 1 else self.line[:, heads]
        start = line.storage_offset() + keys.start + self.call.rows_q - rows.stop
        size = (*line.shape[:2], rows.stop - rows.start, keys.stop - keys.start)
        return line.as_strided(size, (*line.stride()[:2], 1, 1), start)

    def _values(self, i: torch.Tensor, j: torch.Tensor, heads: slice) -> torch.Tensor:
        """The bias of positions that broadcast, (batch or 1, heads or 1, ...)."""
        call = self.call
        b = torch.arange(call.first_batch, call.first_batch + call.batch, device="cpu")[:, None, None, None]
        h = torch.arange(call.num_heads_q, device="cpu")[heads, None, None]
        shape = [call.batch if self.by_batch else 1, h.shape[0] if self.by_head else 1, *torch.broadcast_shapes(i.shape, j.shape)]
        places = {"b": b, "h": h, "i": i, "j": j}
        if call.score is None:
            bias = torch.zeros(shape, dtype=torch.float32, device="cpu")
        else:
            zero = torch.zeros((), dtype=torch.float32, device="cpu")
            added = _evaluate(call.score, call.score.structure.root, {**places, "s": zero})
            bias = added.expand(shape).contiguous()
        if call.mask is not None and self.mask is not None:
            fill([bias], _evaluate(call.mask, self.mask, places), -torch.inf)
        return bias


def _evaluate(bound: Bound, root: Expr, places: dict[str, torch.Tensor]) -> torch.Tensor:
    return evaluate([root], places, [t.detach() for t in bound.tensors], bound.numbers, torch.float32)[0]


@functools.lru_cache(maxsize=4096)
def _only_adds(text: str) -> bool:
    """Whether a score is s plus something without s."""
    node = parse(text).root
    while node.op in ("add", "sub"):
        first, second = ("s" in symbols(arg) for arg in node.args)
        if first == second or (second and node.op == "sub"):
            return False
        node = node.args[0 if first else 1]
    return node.op == "sym" and node.value == "s"


def _of_distance(root: Expr) -> bool:
    """Whether a value depends on i and j by i - j alone: whether it stays when both grow by 1."""
    grows: dict[int, int | None] = {}  # by how much a node grows then, None where that is not one number
    for node in postorder([root]):
        args = [grows[id(arg)] for arg in node.args]
        grows[id(node)] = _growth(node, args)
    return grows[id(root)] == 0


def _growth(node: Expr, args: list[int | None]) -> int | None:
    if node.op == "sym":
        return int(node.value in ("i", "j"))
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    if not any(known):
        return 0
    if node.op in ("add", "sub"):
        return known[0] + known[1] if node.op == "add" else known[0] - known[1]
    if node.op == "neg":
        return -known[0]
    if node.op == "to_float":
        return known[0]
    return 0 if node.op in ("lt", "le", "eq", "ne") and known[0] == known[1] else None
