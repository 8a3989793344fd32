"""What an additive formula adds to scores, as the bias of PyTorch's fused CPU kernel.

The bias holds the score formula's value at s = 0, and -inf where the mask hides. Where it depends on i - j alone, as
ALiBi's and windows' do, one row of numbers is all of it: with the queries in descending order, the entry of query u and
key j lies at u + j.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr
from tilewise.formula.optimize import written_once
from tilewise.formula.structure import Bound, parse
from tilewise.formula.walk import postorder, symbols
from tilewise.ops.attention.cpu_parts import fill
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.variant import CAUSAL

BIAS = 2**21  # numbers of a bias made at a time: 8 MiB


def plain_causal(call: Call) -> bool:
    """Whether the kernel's own causal mask is all."""
    return call.mask is not None and call.mask.text == CAUSAL and call.score is None and call.rows_q == call.rows_k


class Bias:
    """What a call's formula adds to scores, by block."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.shift = call.rows_k - call.rows_q
        self.causal = plain_causal(call)
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
        if self.line is None:
            return x
        return x.index_select(rows, torch.arange(x.shape[rows] - 1, -1, -1, device="cpu"))

    def few_heads(self, rows: slice, keys: slice) -> Iterator[tuple[slice, slice]]:
        """Heads of queries and of keys that are computed together: all, unless their biases would take much memory."""
        call = self.call
        few = call.num_heads_kv
        if self.by_head and self.line is None:
            pairs = (rows.stop - rows.start) * max(1, keys.stop - keys.start)
            few = max(1, BIAS // (pairs * call.group * (call.batch if self.by_batch else 1)))
        for first in range(0, call.num_heads_kv, few):
            heads_kv = slice(first, min(first + few, call.num_heads_kv))
            yield slice(first * call.group, heads_kv.stop * call.group), heads_kv

    def of(self, rows: slice, keys: slice, heads: slice) -> torch.Tensor | None:
        """(batch or 1, heads or 1, rows, keys), in the order of `ordered`."""
        if self.empty:
            return None
        if self.line is None:
            i = torch.arange(rows.start, rows.stop, device="cpu")[:, None] + self.shift
            return self._values(i, torch.arange(keys.start, keys.stop, device="cpu"), heads)
        line = self.line if self.line.shape[1] == 1 else self.line[:, heads]
        start = line.storage_offset() + keys.start + self.call.rows_q - rows.stop
        size = (*line.shape[:2], rows.stop - rows.start, keys.stop - keys.start)
        return line.as_strided(size, (*line.stride()[:2], 1, 1), start)

    def hide_below(self, least: torch.Tensor) -> None:
        """Hide what is smaller than `least` (batch, heads), where that is one look at a row of numbers."""
        if self.line is not None and self.call.score is not None:
            for dim in (0, 1):
                least = least.amin(dim, keepdim=True) if self.line.shape[dim] == 1 else least
            self.line = torch.where(self.line < least[..., None, None], -torch.inf, self.line)

    def _values(self, i: torch.Tensor, j: torch.Tensor, heads: slice) -> torch.Tensor:
        """The bias of positions that broadcast, (batch or 1, heads or 1, ...)."""
        call = self.call
        b = torch.arange(call.first_batch, call.first_batch + call.batch, device="cpu")[:, None, None, None]
        h = torch.arange(call.num_heads_q, device="cpu")[heads, None, None]
        shape = (call.batch if self.by_batch else 1, h.shape[0] if self.by_head else 1, i.shape[0], j.shape[-1])
        places = {"b": b, "h": h, "i": i, "j": j}
        seen = None if call.mask is None or self.mask is None else _evaluate(call.mask, self.mask, places).expand(shape)
        if call.score is None:
            assert seen is not None
            hidden = seen.to(torch.int32).sub_(1)  # all bits
            return hidden.bitwise_and_(torch.tensor(-torch.inf).view(torch.int32)).view(torch.float32)
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        added = _evaluate(call.score, call.score.structure.root, {**places, "s": zero})
        bias = added.expand(shape).contiguous()
        if seen is not None:
            fill([bias], seen, -torch.inf)
        return bias


def _evaluate(bound: Bound, root: Expr, places: dict[str, torch.Tensor]) -> torch.Tensor:
    return evaluate([root], places, [t.detach() for t in bound.tensors], bound.numbers, torch.float32)[0]


@functools.lru_cache(maxsize=4096)
def only_adds(text: str) -> bool:
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
