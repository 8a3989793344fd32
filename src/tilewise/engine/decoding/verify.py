"""Which proposed tokens are emitted: the walk that makes a request's tokens those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilewise.core.errors import InputError
from tilewise.engine.decoding.tree import WORD, TokenTree, TreeBatch


class Verified(NamedTuple):
    """What a step gives to each tree; on the device.

    A request emits `accepted` + 1 tokens: those of the accepted nodes, and the one chosen at the last of them, which is
    its new pending token.

    Args:
        accepted: int64 (trees,), accepted nodes, the root not counted.
        last: int64 (trees,), the row of the last node reached.
        path: int64 (trees, max_depth + 1), rows from the root to it; -1 after the last.
        emitted: int64 (trees, max_depth + 1), emitted tokens; -1 after the last.
        bonus: int64 (trees,), the token chosen at the last node; -1 if its logits were no numbers.
    """

    accepted: torch.Tensor
    last: torch.Tensor
    path: torch.Tensor
    emitted: torch.Tensor
    bonus: torch.Tensor


def walk(batch: TreeBatch, chosen: torch.Tensor) -> Verified:
    """Follow, from the root, the child that equals the token chosen at its parent, as long as there is one.

    Lossless for every proposer: where the token of a position depends on the tokens before it and on noise keyed by
    (seed, position) alone, as in `tilewise.sample`, each emitted token is the one that plain decoding emits. The root's
    is; and a node that is reached has the tokens of plain decoding before it, so the token chosen there is plain
    decoding's, too. What was proposed decides only how many of them one step gives.

    Args:
        batch: the trees.
        chosen: int64 (rows,), the token chosen at each row, at the position after the row's.

    Returns:
        `Verified`, without a wait for the device.

    Raises:
        InputError: `chosen` does not fit the rows.

    Source: for greedy decoding, Stern, Shazeer and Uszkoreit, "Blockwise Parallel Decoding for Deep Autoregressive
    Models", 2018; noise shared by position, Daliri, Musco and Suresh, "Coupling without Communication and
    Drafter-Invariant Speculative Decoding", 2024.

    Example:
        >>> from tilewise.engine.decoding.tree import TokenTree, TreeBatch
        >>> from tilewise.engine.decoding.verify import walk
        >>> batch = TreeBatch.of([TokenTree((7, 1, 2, 3), (-1, 0, 0, 2))], [10])
        >>> walk(batch, torch.tensor([2, 5, 3, 8])).emitted.tolist()
        [[2, 3, 8]]
    """
    _check(batch, chosen)
    return follow(batch, batch.tokens == chosen[batch.parents.long()], chosen)


def follow(batch: TreeBatch, good: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor | None = None) -> Verified:
    """The longest path of nodes that are all eligible and good.

    Args:
        batch: the trees.
        good: bool (rows,), whether a node may follow its parent. Roots are always reached.
        chosen: int64 (rows,), the token chosen at each row.
        scores: float (rows,), of paths of one length the largest wins, then the first. None is 0 for all.

    Returns:
        `Verified`, without a wait for the device.
    """
    _check(batch, chosen)
    rows, trees = batch.tokens.shape[0], batch.cu.shape[0] - 1
    device, of = batch.tokens.device, batch.trees.long()
    first = batch.cu[:-1].long()
    node = torch.arange(rows, device=device) - first[of]
    known = chosen[batch.parents.long()] >= 0  # else the parent's logits were no numbers
    good = (good & known & batch.eligible) | (node == 0)
    bits = good.long() << node % WORD
    words = torch.zeros(trees, batch.ancestors.shape[1], dtype=torch.int64, device=device)
    words.index_put_((of, node // WORD), bits, accumulate=True)  # each bit once: a sum is a union
    reached = (batch.ancestors & ~words[of] == 0).all(1)

    depth = torch.where(reached, batch.depths.long(), -1)
    accepted = _largest(depth, of, trees)
    best = reached & (depth == accepted[of])
    if scores is not None:
        score = torch.where(best, scores.nan_to_num(-1e30), -torch.inf)
        best &= score == _largest(score, of, trees)[of]
    last = -_largest(torch.where(best, -node, -rows), of, trees) + first
    return _spelled(batch, chosen, accepted, last, node)


def _spelled(
    batch: TreeBatch, chosen: torch.Tensor, accepted: torch.Tensor, last: torch.Tensor, node: torch.Tensor
) -> Verified:
    """Paths and tokens, by depth; what is not on the path goes to a column that is dropped."""
    of, width, trees = batch.trees.long(), batch.max_depth + 1, len(accepted)
    seen = batch.ancestors[last][of].gather(1, (node // WORD)[:, None])[:, 0] >> node % WORD & 1
    column = torch.where(seen == 1, batch.depths.long(), width)
    rows = torch.arange(len(of), device=of.device)
    path = torch.full((trees, width + 1), -1, dtype=torch.int64, device=of.device)
    path[of, column] = rows
    emitted = torch.full_like(path, -1)
    emitted[of, torch.where((column > 0) & (seen == 1), column - 1, width)] = batch.tokens.long()
    bonus = chosen[last]
    emitted.scatter_(1, accepted[:, None], bonus[:, None])
    after = torch.arange(width + 1, device=of.device) > accepted[:, None]
    return Verified(accepted, last, path[:, :width], emitted.masked_fill(after, -1)[:, :width], bonus)


def _largest(x: torch.Tensor, of: torch.Tensor, trees: int) -> torch.Tensor:
    """Of each tree, which has at least its root."""
    least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    return torch.full((trees,), least, dtype=x.dtype, device=x.device).scatter_reduce_(0, of, x, "amax")


def walk_reference(tree: TokenTree, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """The specification of `walk`, for one tree.

    Returns:
        (path, emitted): accepted nodes, the root not included, and the tokens.
    """
    best: list[int] = []
    todo: list[list[int]] = [[]]
    while todo:  # more than one where siblings are equal
        path = todo.pop(0)
        node = path[-1] if path else 0
        best = max(best, path, key=lambda each: (len(each), -sum(each[-1:])))  # of equal length the first node
        for n, up in enumerate(tree.parents):
            if up == node and tree.eligible[n] and tree.tokens[n] == chosen[node]:
                todo.append([*path, n])
    return best, [*(tree.tokens[n] for n in best), chosen[best[-1] if best else 0]]


def _check(batch: TreeBatch, chosen: torch.Tensor) -> None:
    if chosen.shape != batch.tokens.shape or chosen.dtype != torch.int64:
        expected = f"int64 of shape {tuple(batch.tokens.shape)}, one a row"
        got = f"{chosen.dtype} of shape {tuple(chosen.shape)}"
        raise InputError("chosen", got=got, expected=expected, hint="pass tilewise.sample(...).tokens")
