"""Masks by name: ordinary expressions, to combine or to read as examples. `tilewise.formula.scores` has the scores.

`i` is the query's position on the key axis, so every mask here is aligned to the bottom right: with fewer queries than
keys the last query has the position of the last key. Each raises InputError for an argument of the wrong type, rank or
range, and the call raises it where sizes do not fit.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.core.readback import unreadable, values_checked
from tilewise.formula import expr as e
from tilewise.formula.arguments import check_integer, check_tensor, lead_of, sizes_of, sizes_of_table
from tilewise.formula.expr import Expr
from tilewise.formula.formula import Mask, mask
from tilewise.formula.sizes import Size


def _causal(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
    return i >= j


causal: Mask = mask(_causal, "causal")
"""Each query sees its own position and all before it.

With fewer queries than keys the last query stands at the last key.

Example:
    >>> o = tw.attention(q, k, v, mask=tw.causal)
"""


def window(left: int | None, right: int | None = 0) -> Mask:
    """Sliding window: key j is visible to query i when i - left < j <= i + right.

    Args:
        left: keys to the left that are visible, counting the query's own; None for no limit.
        right: keys to the right that are visible; 0 is causal, None is no limit. `window(n, n - 1)` is symmetric.

    Returns:
        A mask.

    Raises:
        InputError: left is below 1 or right below 0, or one of them is no integer.

    Source: Beltagy et al., "Longformer"; Jiang et al., "Mistral 7B".

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.window(128))
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
    """Keys of the query's own chunk of `size` positions: Llama 4's chunked attention, without causality.

    Args:
        size: positions that share a chunk, at least 1.

    Returns:
        A mask.

    Raises:
        InputError: size is no integer of at least 1.

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal & tw.chunked(64))
    """
    check_integer("chunked size", size, "the number of positions that share a chunk")
    return mask(lambda b, h, i, j: i // size == j // size, lambda: f"chunked({size})")


def prefix(lengths: torch.Tensor) -> Mask:
    """Keys before `lengths[b]` are visible to every query; `causal | prefix(lengths)` is prefix-LM attention.

    Args:
        lengths: integer tensor (batch,), in tokens.

    Returns:
        A mask.

    Raises:
        InputError: lengths is no integer tensor of one dimension.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning".

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal | tw.prefix(torch.tensor([10, 40])))
    """
    check_tensor("prefix lengths", lengths, (1,), "integer", "a length for each batch element: torch.tensor([5, 9])")
    return mask(lambda b, h, i, j: j < lengths[b], "prefix(lengths)").sized(
        *sizes_of("prefix lengths", lengths, "batch")
    )


def lengths(seqlens: torch.Tensor) -> Mask:
    """Right padding: keys from `seqlens[b]` on are invisible.

    Args:
        seqlens: integer tensor (batch,), in tokens.

    Returns:
        A mask.

    Raises:
        InputError: seqlens is no integer tensor of one dimension.

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.lengths(torch.tensor([100, 57])))
    """
    check_tensor("lengths seqlens", seqlens, (1,), "integer", "a length for each batch element: torch.tensor([5, 9])")
    return mask(lambda b, h, i, j: j < seqlens[b], "lengths(seqlens)").sized(
        *sizes_of("lengths seqlens", seqlens, "batch")
    )


def sinks(count: int) -> Mask:
    """The first `count` keys, which every query sees: attention sinks, beside a window.

    Args:
        count: how many, at least 1.

    Returns:
        A mask.

    Raises:
        InputError: count is no integer of at least 1.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks".

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal & (tw.window(64) | tw.sinks(4)))
    """
    check_integer("sinks count", count, "how many keys from the first on every query sees, such as 4")
    return mask(lambda b, h, i, j: j < count, lambda: f"sinks({count})")


def document(ids: torch.Tensor, *, ascending: bool = False) -> Mask:
    """Queries see keys of their own document.

    Args:
        ids: integer tensor (seqlen_k,) or (batch, seqlen_k), the document of each position.
        ascending: whether ids never fall, so that a document is one run of positions. The run's two ends are then
            computed here once, which is faster on a GPU than comparing ids. Checked on a CPU, and on a GPU with
            TILEWISE_DEBUG=1.

    Returns:
        A mask.

    Raises:
        InputError: ids is no integer tensor of one or two dimensions, or falls although `ascending`.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination".

    Example:
        >>> ids = torch.arange(100) // 30  # documents of 30, 30, 30 and 10 tokens
        >>> o = tw.attention(q, k, v, mask=tw.causal & tw.document(ids, ascending=True))
    """
    check_flags(ascending=ascending)
    check_tensor("document ids", ids, (1, 2), "integer", "its document for each position: torch.tensor([0, 0, 1])")
    sizes = sizes_of("document ids", ids, "batch", "seqlen_k")
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
    """Tree attention for speculative decoding: each position sees its ancestors and itself in a tree of candidates.

    Args:
        entry, exit: integer tensors (seqlen_k,), the depth-first entry and exit times of each position's node, as
            `tree_times` gives them. The interval of an ancestor contains those of its descendants.

    Returns:
        A mask.

    Raises:
        InputError: one of them is no integer tensor of one dimension.

    Source: Miao et al., "SpecInfer".

    Example:
        >>> chain = [*range(-1, 97)]  # 98 tokens, each the parent of the next; then two candidates
        >>> o = tw.attention(q, k, v, mask=tw.tree(*tw.tree_times([*chain, 97, 97])))
    """
    for name, times in (("tree entry", entry), ("tree exit", exit)):
        check_tensor(name, times, (1,), "integer", "tilewise.tree_times(parents) makes both")
    sizes = (*sizes_of("tree entry", entry, "seqlen_k"), *sizes_of("tree exit", exit, "seqlen_k"))
    return mask(lambda b, h, i, j: (entry[j] <= entry[i]) & (exit[i] <= exit[j]), "tree(entry, exit)").sized(*sizes)


def tree_times(parents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Depth-first entry and exit times of a forest, for `tree`.

    Args:
        parents: the parent of each node, -1 for a root.

    Returns:
        (entry, exit): int32 tensors (nodes,).

    Raises:
        InputError: parents is no sequence of such integers, or has a cycle.

    Example:
        >>> entry, exit = tw.tree_times([-1, 0, 0])
        >>> entry.tolist(), exit.tolist()
        ([0, 1, 3], [5, 2, 4])
    """
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
    """Every `step`-th key, counted from the query; with a window, a dilated window.

    Args:
        step: at least 1, which is every key.

    Returns:
        A mask.

    Raises:
        InputError: step is no integer of at least 1.

    Source: Beltagy et al., "Longformer".

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.window(64) & tw.dilated(2))
    """
    check_integer("dilated step", step, "a step of 1 sees every key")
    return mask(lambda b, h, i, j: i % step == j % step, lambda: f"dilated({step})")


def blocks(visible: torch.Tensor, block_size: int) -> Mask:
    """Block-sparse attention: pair (i, j) is visible where `visible[i // block_size, j // block_size]`.

    Args:
        visible: bool tensor (blocks, blocks), (num_heads_q, blocks, blocks) or (batch, num_heads_q, blocks, blocks).
            Its rows are blocks of positions on the key axis: both extents are ceil(seqlen_k / block_size).
        block_size: positions in a block, at least 1.

    Returns:
        A mask.

    Raises:
        InputError: visible is no such tensor, or block_size no integer of at least 1.

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.blocks(torch.rand(4, 4) < 0.5, 25))
    """
    check_tensor(
        "blocks map", visible, (2, 3, 4), "boolean", "True where a block of queries sees a block of keys; map > 0"
    )
    check_integer("blocks block_size", block_size, "the positions that one entry of the map stands for, such as 64")
    lead = visible.ndim - 2

    def body(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        index = (*((b, h)[2 - lead :]), i // block_size, j // block_size)
        return e.cast(e.load(visible, index), bool)

    of_blocks = [Size("blocks map", "seqlen_k", extent, block_size) for extent in visible.shape[-2:]]
    of_heads = sizes_of("blocks map", visible[..., 0, 0] if lead else None, "batch", "num_heads_q")
    return mask(body, lambda: f"blocks(map, {block_size})").sized(*of_heads, *of_blocks)


def explicit(keep: torch.Tensor) -> Mask:
    """A mask that is given pair by pair. A formula is faster: it needs no seqlen_q x seqlen_k memory.

    Args:
        keep: bool tensor (1 or batch, 1 or num_heads_q, seqlen_q, seqlen_k) or (seqlen_q, seqlen_k), True where
            visible. Row 0 is the first query, whose position is seqlen_k - seqlen_q.

    Returns:
        A mask.

    Raises:
        InputError: keep is no bool tensor of two or four dimensions.

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.explicit(torch.rand(100, 100) < 0.5))
    """
    check_tensor("explicit mask", keep, (2, 4), "boolean", "keep[None] adds a batch dimension, keep != 0 is boolean")
    table, shift = keep if keep.ndim == 4 else keep[None, None], keep.shape[-1] - keep.shape[-2]
    return mask(
        lambda b, h, i, j: e.cast(e.load(table, (*lead_of(table, b, h), i - shift, j)), bool),
        lambda: f"explicit({tuple(keep.shape)})",
    ).sized(*sizes_of_table("explicit mask", table))
