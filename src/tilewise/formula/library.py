"""Masks and scores by name: ordinary expressions, to combine or to read as examples.

`i` is the query's place on the key axis, so every mask here is aligned to the bottom right: with fewer queries than
keys the last query stands at the last key. Each raises InputError for an argument of the wrong type, rank or range.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.core.readback import unreadable, values_checked
from tilewise.core.real import is_finite
from tilewise.core.tensors import check_dense
from tilewise.formula import expr as e
from tilewise.formula.expr import Expr
from tilewise.formula.formula import Mask, Score, mask, score
from tilewise.formula.sizes import Size


def _causal(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
    return i >= j


causal: Mask = mask(_causal, "causal")
"""Each query sees itself and what came before."""


def window(left: int | None, right: int | None = 0) -> Mask:
    """Sliding window: key j is visible to query i when i - left < j <= i + right.

    `window(n)` sees n keys counting itself; `window(n, n - 1)` is symmetric. None lifts a side's limit. Sources:
    Beltagy et al., "Longformer"; Jiang et al., "Mistral 7B".
    """
    for name, value, least in (("left", left, 1), ("right", right, 0)):
        if value is not None:
            hint = "None lifts the limit; left counts the query's own key, right does not"
            check_integer(f"window {name}", value, hint, least, "None or an integer")
    i, j = e.sym("i"), e.sym("j")
    # compare(), not <: under torch.compile a changing int is symbolic, and dynamo mistakes object < symbolic int
    parts = [] if left is None else [e.compare("lt", i - j, left)]
    parts += [] if right is None else [e.compare("le", j - i, right)]
    result = e.TRUE
    for part in parts:
        result = e.logic("and", result, part)
    return Mask(result, lambda: f"window({left})" if right == 0 else f"window({left}, {right})")


def chunked(size: int) -> Mask:
    """Only keys of the query's own chunk of `size` positions (Llama 4's chunked attention, without causality)."""
    check_integer("chunked size", size, "the number of positions that share a chunk")
    return mask(lambda b, h, i, j: i // size == j // size, lambda: f"chunked({size})")


def prefix(lengths: torch.Tensor) -> Mask:
    """Keys before `lengths[b]` are visible to every query; `causal | prefix(lengths)` is prefix-LM attention
    (Raffel et al., "Exploring the Limits of Transfer Learning").

    Args:
        lengths: integer tensor (batch,).
    """
    _tensor("prefix lengths", lengths, (1,), "integer", "a length for each batch element: torch.tensor([5, 9])")
    return mask(lambda b, h, i, j: j < lengths[b], "prefix(lengths)").sized(*_of("prefix lengths", lengths, "batch"))


def lengths(seqlens: torch.Tensor) -> Mask:
    """Right padding: keys from `seqlens[b]` on are invisible. `seqlens` is an integer tensor (batch,)."""
    _tensor("lengths seqlens", seqlens, (1,), "integer", "a length for each batch element: torch.tensor([5, 9])")
    return mask(lambda b, h, i, j: j < seqlens[b], "lengths(seqlens)").sized(*_of("lengths seqlens", seqlens, "batch"))


def sinks(count: int) -> Mask:
    """The first `count` keys; with a window, `window(1024) | sinks(4)`, the attention sinks of Xiao et al., "Efficient
    Streaming Language Models with Attention Sinks".
    """
    check_integer("sinks count", count, "how many keys from the first on every query sees, such as 4")
    return mask(lambda b, h, i, j: j < count, lambda: f"sinks({count})")


def document(ids: torch.Tensor, *, ascending: bool = False) -> Mask:
    """Queries see keys of their own document.

    Args:
        ids: integer tensor (seqlen_k,) or (batch, seqlen_k), the document of each position.
        ascending: whether ids never fall, so that a document is one run of positions. What a query sees is then known
            by its two ends, which are worked out here, and costs a GPU less than comparing ids (values are checked on a
            CPU, and with TILEWISE_DEBUG=1).

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination".
    """
    check_flags(ascending=ascending)
    _tensor("document ids", ids, (1, 2), "integer", "its document for each position: torch.tensor([0, 0, 1])")
    sizes = _of("document ids", ids, "batch", "seqlen_k")
    if ascending:
        return _runs_of_documents(ids).sized(*sizes)
    if ids.ndim == 1:
        return mask(lambda b, h, i, j: ids[i] == ids[j], "document(ids)").sized(*sizes)
    return mask(lambda b, h, i, j: ids[b, i] == ids[b, j], "document(ids)").sized(*sizes)


def _runs_of_documents(ids: torch.Tensor) -> Mask:
    falls = ids[..., 1:] < ids[..., :-1]
    if values_checked(ids.device) and not unreadable(ids) and bool(falls.any()):
        raise InputError(
            "document ids",
            got="ids that fall",
            expected="ids that never do, with ascending=True",
            hint="sort documents, or leave ascending out",
        )
    at = torch.arange(ids.shape[-1], device=ids.device)
    ends = ids.new_ones(ids.shape, dtype=torch.bool)  # after which another document begins
    ends[..., :-1] = ids[..., 1:] != ids[..., :-1]
    begins = ids.new_ones(ids.shape, dtype=torch.bool)
    begins[..., 1:] = ends[..., :-1]
    first = torch.where(begins, at, 0).cummax(-1).values
    last = torch.where(ends, at, ids.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    both = torch.stack([first, last]).int()  # in one tensor: kernels are given one pointer

    def inside(b: Any, x: Any, y: Any) -> Any:
        where = (e.rising(x),) if ids.ndim == 1 else (b, e.rising(x))
        return (both[(0, *where)] <= y) & (y <= both[(1, *where)])

    of_keys = mask(lambda b, h, i, j: inside(b, i, j), "document(ids)")
    of_queries = mask(lambda b, h, i, j: inside(b, j, i), "document(ids)")
    return Mask(e.alike(of_keys.expr, of_queries.expr), "document(ids, ascending=True)")


def tree(entry: torch.Tensor, exit: torch.Tensor) -> Mask:
    """Each position sees its ancestors and itself in a tree of candidates (Miao et al., "SpecInfer").

    Args:
        entry, exit: integer tensors (seqlen_k,) with the depth-first entry and exit times of each position's node
            (`tree_times`); an ancestor's interval contains its descendants'.
    """
    for name, times in (("tree entry", entry), ("tree exit", exit)):
        _tensor(name, times, (1,), "integer", "tilewise.tree_times(parents) makes both")
    sizes = (*_of("tree entry", entry, "seqlen_k"), *_of("tree exit", exit, "seqlen_k"))
    return mask(lambda b, h, i, j: (entry[j] <= entry[i]) & (exit[i] <= exit[j]), "tree(entry, exit)").sized(*sizes)


def tree_times(parents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Depth-first entry and exit times, int32 (n,), of a forest given by each node's parent (-1 for a root)."""
    if not hasattr(parents, "__len__"):
        hint = "the parent of every node, -1 for a root: tree_times([-1, 0, 0])"
        raise InputError("tree parents", got=type(parents).__name__, expected="a sequence of integers", hint=hint)
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for node, parent in enumerate(parents):
        if not isinstance(parent, numbers.Integral) or not -1 <= parent < len(parents) or parent == node:
            raise InputError(
                "tree parents",
                got=f"parent {parent!r} of node {node}",
                expected="-1 or another node's index",
                hint="-1 marks a root, and nodes count from 0; a tensor gives integers by .tolist()",
            )
        (roots if parent < 0 else children[parent]).append(node)
    entry, exit_, clock = [0] * len(parents), [-1] * len(parents), 0
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, leaving = stack.pop()
        if leaving:
            exit_[node] = clock
        else:
            entry[node] = clock
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children[node]))
        clock += 1
    if -1 in exit_:
        raise InputError("tree parents", got="a cycle", expected="a forest", hint="a root has parent -1")
    return torch.tensor(entry, dtype=torch.int32), torch.tensor(exit_, dtype=torch.int32)


def dilated(step: int) -> Mask:
    """Every `step`-th key, counted from the query; with a window, that of Beltagy et al., "Longformer", dilated."""
    check_integer("dilated step", step, "a step of 1 sees every key")
    return mask(lambda b, h, i, j: i % step == j % step, lambda: f"dilated({step})")


def blocks(visible: torch.Tensor, block_size: int) -> Mask:
    """Block-sparse attention: pair (i, j) is visible where `visible[i // block_size, j // block_size]`.

    Args:
        visible: bool tensor (blocks, blocks), (num_heads_q, blocks, blocks) or (batch, num_heads_q, blocks, blocks).
            Its rows are blocks of positions on the key axis: both extents are ceil(seqlen_k / block_size).
    """
    _tensor("blocks map", visible, (2, 3, 4), "boolean", "True where a block of queries sees a block of keys; map > 0")
    check_integer("blocks block_size", block_size, "the positions that one entry of the map stands for, such as 64")
    lead = visible.ndim - 2

    def body(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        index = (*((b, h)[2 - lead :]), i // block_size, j // block_size)
        return e.cast(e.load(visible, index), bool)

    of_blocks = [Size("blocks map", "seqlen_k", extent, block_size) for extent in visible.shape[-2:]]
    of_heads = _of("blocks map", visible[..., 0, 0] if lead else None, "batch", "num_heads_q")
    return mask(body, lambda: f"blocks(map, {block_size})").sized(*of_heads, *of_blocks)


def explicit(keep: torch.Tensor) -> Mask:
    """A boolean tensor (1 or batch, 1 or heads, seqlen_q, seqlen_k) or (seqlen_q, seqlen_k), True where visible.

    Its rows are queries, so with fewer queries than keys row 0 stands at key seqlen_k - seqlen_q.
    """
    _tensor("explicit mask", keep, (2, 4), "boolean", "keep[None] adds a batch dimension, keep != 0 is boolean")
    table, shift = keep if keep.ndim == 4 else keep[None, None], keep.shape[-1] - keep.shape[-2]
    return mask(
        lambda b, h, i, j: e.cast(e.load(table, (*_lead(table, b, h), i - shift, j)), bool),
        lambda: f"explicit({tuple(keep.shape)})",
    ).sized(*_of_table("explicit mask", table))


def alibi(slopes: torch.Tensor) -> Score:
    """ALiBi: s - slope * |i - j| (Press et al., "Train Short, Test Long").

    Args:
        slopes: float tensor (num_heads_q,) or (batch, num_heads_q), differentiable.
    """
    _tensor("alibi slopes", slopes, (1, 2), "floating-point", "a slope for each query head: torch.rand(num_heads_q)")
    sizes = _of("alibi slopes", slopes, "batch", "num_heads_q")
    if slopes.ndim == 1:
        return score(lambda s, b, h, i, j: s - slopes[h] * abs(i - j), "alibi(slopes)").sized(*sizes)
    return score(lambda s, b, h, i, j: s - slopes[b, h] * abs(i - j), "alibi(slopes)").sized(*sizes)


def softcap(cap: float) -> Score:
    """cap * tanh(s / cap): scores stay within (-cap, cap) (Gemma Team, "Gemma 2")."""
    symbolic = isinstance(cap, (torch.SymInt, torch.SymFloat))
    if not symbolic and not (is_finite(cap) and cap > 0):
        raise InputError("softcap cap", got=shown(cap), expected="a finite number > 0", hint="leave it out for no cap")
    return score(lambda s, b, h, i, j: float(cap) * e.unary("tanh", s / float(cap)), lambda: f"softcap({cap})")


def relative_bias(table: torch.Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """T5's relative position bias: s + table[bucket(j - i), h].

    Source: Raffel et al., "Exploring the Limits of Transfer Learning".

    Args:
        table: float tensor (num_buckets, num_heads_q), differentiable.
        bidirectional: half of the buckets for keys after the query; else those share bucket 0.
        max_distance: distance from which on the last bucket is used.
    """
    check_flags(bidirectional=bidirectional)
    _tensor("relative_bias table", table, (2,), "floating-point", "a row for each bucket, a column for each head")
    check_integer("relative_bias max_distance", max_distance, "T5 has 128", most=2**31 - 1)
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise InputError(
            "relative_bias",
            got=f"{table.shape[0]} buckets, max_distance {max_distance}",
            expected="at least 4 buckets (2 if not bidirectional), and max_distance beyond the exact ones",
            hint="the first half of a direction's buckets hold one distance each; T5 has 32 and max_distance 128",
        )
    scale = (buckets - exact) / math.log(max_distance / exact)

    def biased(s: Expr, b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        distance = abs(i - j) if bidirectional else (i - j).clamp(min=0)
        # the slack puts distances on a bucket's edge into the bucket that T5's float32 gives, in every precision
        far = e.unary("log", distance.clamp(min=exact).float() * (1.0 / exact)) * scale + 1e-5
        near = distance.clamp(max=exact - 1)  # the clamp lets the bounds of the bucket be proved
        bucket = e.where(e.compare("lt", distance, exact), near, (far.int() + exact).clamp(max=buckets - 1))
        if bidirectional:
            bucket = bucket + e.where(j > i, buckets, 0)
        return s + e.load(table, (bucket, h))

    sizes = _of("relative_bias table", table[0], "num_heads_q")
    return score(biased, lambda: f"relative_bias({tuple(table.shape)})").sized(*sizes)


def bias(values: torch.Tensor) -> Score:
    """s + values[b, h, query, key], differentiable.

    Args:
        values: float tensor (1 or batch, 1 or heads, seqlen_q, seqlen_k) or (seqlen_q, seqlen_k).
    """
    _tensor("bias", values, (2, 4), "floating-point", "values[None] adds a batch dimension; explicit() hides pairs")
    table = values if values.ndim == 4 else values[None, None]
    shift = values.shape[-1] - values.shape[-2]
    return score(
        lambda s, b, h, i, j: s + e.load(table, (*_lead(table, b, h), i - shift, j)),
        lambda: f"bias({tuple(values.shape)})",
    ).sized(*_of_table("bias", table))


def tanh_score() -> Score:
    """tanh(s) as the score."""
    return score(lambda s, b, h, i, j: e.unary("tanh", s), "tanh_score()")


def sigmoid_score() -> Score:
    """sigmoid(s) as the score."""
    return score(lambda s, b, h, i, j: e.unary("sigmoid", s), "sigmoid_score()")


def _lead(table: torch.Tensor, b: Expr, h: Expr) -> tuple[Expr, Expr]:
    return (b if table.shape[0] > 1 else e.lit(0)), (h if table.shape[1] > 1 else e.lit(0))


def _of(name: str, table: torch.Tensor | None, *axes: str) -> tuple[Size, ...]:
    """The sizes of a table that has the last of these axes, as many as it has dimensions."""
    shape = () if table is None else table.shape
    return tuple(Size(name, axis, n) for axis, n in zip(axes[len(axes) - len(shape) :], shape, strict=True))


def _of_table(name: str, table: torch.Tensor) -> tuple[Size, ...]:
    """Of a table (1 or batch, 1 or heads, seqlen_q, seqlen_k)."""
    sizes = _of(name, table, "batch", "num_heads_q", "seqlen_q", "seqlen_k")
    shift = Size(name, "shift", table.shape[3] - table.shape[2])
    return (*(size for size in sizes[:2] if size.extent != 1), *sizes[2:], shift)


def check_integer(
    name: str, value: Any, hint: str, least: int = 1, kind: str = "an integer", most: int | None = None
) -> None:
    """Symbolic integers of torch.compile pass."""
    whole = isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool)
    if not isinstance(value, torch.SymInt) and not (whole and value >= least):
        raise InputError(name, got=shown(value), expected=f"{kind} >= {least}", hint=hint)
    if most is not None and not isinstance(value, torch.SymInt) and value > most:
        raise InputError(name, got=shown(value), expected=f"{kind} from {least} to {most}", hint=hint)


def _tensor(name: str, value: Any, ranks: tuple[int, ...], kind: str, hint: str) -> None:
    """Raise unless `value` is a tensor of these ranks and of `kind`: floating-point, integer, or boolean."""
    wanted = f"{'an' if kind[0] == 'i' else 'a'} {kind} tensor of rank {' or '.join(map(str, ranks))}"
    check_dense(name, value, wanted, hint)
    if value.ndim not in ranks or value.is_floating_point() != (kind == "floating-point") or value.is_complex():
        additive = kind == "boolean" and value.is_floating_point()
        raise InputError(
            name,
            got=f"{value.dtype} of shape {tuple(value.shape)}",
            expected=wanted,
            hint="numbers to add to the scores go to score=tilewise.bias(values)" if additive else hint,
        )
