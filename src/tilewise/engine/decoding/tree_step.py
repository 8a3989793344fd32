"""Trees of a step on its device: what their nodes see, and which of their keys, values and tokens stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewise.engine.decoding.tree import TokenTree, TreeBatch
from tilewise.engine.decoding.verify import Verified
from tilewise.kv.transfer import send, send_lists

_NO_TREE = 2**30  # where the tree of a request without one begins


class Planted(NamedTuple):
    """A tree in a step.

    Args:
        tree: its nodes; the root is the pending token.
        entry: its place among the requests of the step.
        row: its root's, among the tokens of the step; the other nodes follow.
        start: tokens before the pending one.
        slot: of its request.
    """

    tree: TokenTree
    entry: int
    row: int
    start: int
    slot: int


def is_chain(tree: TokenTree) -> bool:
    """Whether each node follows the one before."""
    return tree.parents == tuple(range(-1, len(tree.parents) - 1))


def visible(trees: Sequence[Planted], entries: int, device: torch.device) -> Callable[..., Any]:
    """A mask for a step with trees: a node sees what is before its tree, and its ancestors; others see as always.

    Args:
        trees: of the step, one after another in the requests' pages.
        entries: requests of the step.
        device: of the step.
    """
    width = max(len(each.tree.tokens) for each in trees)
    rows = [[0] * width for _ in range(entries)]
    begins = [_NO_TREE] * entries
    for each in trees:
        words = [row[0] for row in each.tree.words(1)]
        rows[each.entry][: len(words)] = words
        begins[each.entry] = each.start
    words_, first = send(rows, torch.int64, device), send(begins, torch.int64, device)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        node, other = torch.clamp(i - first[b], 0, width - 1), torch.clamp(j - first[b], 0, width - 1)
        return (j <= i) & ((j < first[b]) | ((words_[b, node] >> other) & 1 != 0))

    return mask


class PlantedBatch:
    """Trees of a step, flattened.

    Args:
        trees: of the step.
        device: of the step.
    """

    def __init__(self, trees: Sequence[Planted], device: torch.device) -> None:
        self.trees = trees
        self.batch = TreeBatch.of([each.tree for each in trees], [each.start for each in trees], device)
        slots, starts, rows = send_lists(
            [
                [each.slot for each in trees],
                [each.start for each in trees],
                [each.row + n for each in trees for n in range(len(each.tree.tokens))],
            ],
            device,
        )
        self._slots, self._starts, self.rows = slots, starts, rows

    @property
    def slots_of_rows(self) -> torch.Tensor:
        """int64, of each node."""
        return self._slots[self.batch.trees.long()].long()

    def nodes(self, verified: Verified) -> torch.Tensor:
        """int64 (trees, max_depth + 1): the root and the accepted nodes of each tree, -1 after them."""
        return torch.where(verified.path < 0, -1, verified.path - self.batch.cu[:-1, None])

    def write(self, verified: Verified, tokens: torch.Tensor) -> None:
        """Write emitted tokens after the pending ones.

        Args:
            verified: what the step gave.
            tokens: int32 (slots, length), of each slot.
        """
        slots = self._slots[:, None].long()
        after = torch.arange(1, verified.emitted.shape[1] + 1, device=tokens.device)
        there = verified.path >= 0
        columns = self._starts[:, None] + torch.where(there, after, 0)  # else the pending one is written once more
        pending = tokens[slots, self._starts[:, None].long()]
        tokens[slots, columns.long()] = torch.where(there, verified.emitted.clamp(min=0).int(), pending)

    def moves(self, verified: Verified) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(slots, positions, positions), each int32 (trees * (max_depth + 1),): accepted nodes' keys and values go from
        the first positions to the second; others stay where they are.
        """
        nodes = self.nodes(verified).clamp(min=0)
        depths = torch.where(verified.path < 0, 0, torch.arange(nodes.shape[1], device=nodes.device))
        starts = self._starts[:, None]
        places = ((starts + x).int().flatten() for x in (nodes, depths))
        return self._slots[:, None].expand_as(nodes).flatten(), *places  # type: ignore[return-value]
