"""Trees of proposed tokens: each node is a token after its parent's, and the root is the token that a request has
sampled but not yet computed (its pending token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.real import is_finite
from tilewise.kv.arguments import check_count
from tilewise.kv.transfer import send, send_lists

WORD = 64  # bits of a word of ancestors


@dataclass(frozen=True)
class TokenTree:
    """Proposed tokens of one request, parents before children.

    Siblings may have the same token: a rule then follows any of them.

    Args:
        tokens: of the nodes; node 0, the root, is the pending token.
        parents: of the nodes; -1 for the root, and smaller than the node for others.
        values: of the nodes, from 0 to 1: the estimated probability that a node and all its ancestors are accepted, so
            at most the parent's. Empty is 1 for all.
        eligible: whether a node may be accepted. Others are only computed, for the proposer. Empty is true for all.
        ids: the nodes' numbers in the tree that was proposed, which `cut` keeps. Empty is 0, 1, ...

    Raises:
        InputError: nodes out of order, lists of different lengths, a value out of range.

    Example:
        >>> from tilewise.engine.decoding.tree import TokenTree
        >>> tree = TokenTree((7, 1, 2, 3), (-1, 0, 0, 2), (1.0, 0.5, 0.4, 0.3))
        >>> tree.depths, tree.path(3), tree.cut(2).tokens
        ((0, 1, 1, 2), (2, 3), (7, 1, 2))
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    values: tuple[float, ...] = ()
    eligible: tuple[bool, ...] = ()
    ids: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        count = len(self.tokens)
        defaults = {"values": (1.0,) * count, "eligible": (True,) * count, "ids": tuple(range(count))}
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        for name in ("parents", *defaults):
            if len(getattr(self, name)) != count or not count:
                got, hint = f"{len(getattr(self, name))} for {count} tokens", "node 0 is the pending token"
                raise InputError(name, got=got, expected="one for each node, at least one", hint=hint)
        if self.parents[0] != -1 or not all(0 <= up < n for n, up in enumerate(self.parents[1:], 1)):
            hint = "number nodes so that parents come before children"
            raise InputError("parents", got=shown(self.parents), expected="-1, then smaller numbers", hint=hint)
        bounds = (1.0, *(self.values[up] for up in self.parents[1:]))
        if not all(is_finite(x) and 0 <= x <= most for x, most in zip(self.values, bounds, strict=True)):
            hint = "a node is accepted at most as often as its parent"
            raise InputError("values", got=shown(self.values), expected="from 0 to the parent's value", hint=hint)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Tokens between the root and each node; the root has 0."""
        found = [0]
        for up in self.parents[1:]:
            found.append(found[up] + 1)
        return tuple(found)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Of each node the set of nodes that it sees, itself included, as bits: bit n of an integer of any size."""
        found = [1]
        for n, up in enumerate(self.parents[1:], 1):
            found.append(found[up] | 1 << n)
        return tuple(found)

    def words(self, count: int) -> list[list[int]]:
        """`ancestors` as `count` words of 64 bits, as int64 holds them."""
        split = [[bits >> WORD * n & 2**WORD - 1 for n in range(count)] for bits in self.ancestors]
        return [[word - (word >> WORD - 1 << WORD) for word in row] for row in split]

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root, which is left out, to a node."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return tuple(reversed(found))

    def cut(self, nodes: int) -> TokenTree:
        """The tree of the root and so many of the most valuable nodes. Those that are not eligible serve their
        proposer together, so all or none of them stay.
        """
        check_count("nodes", nodes, 0)
        if nodes >= len(self.tokens) - 1:
            return self
        order = sorted(
            range(1, len(self.tokens)), key=lambda n: -self.values[n]
        )  # parents before children: it is stable
        if not all(self.eligible[n] for n in order[nodes:]):
            order = [n for n in order if all(self.eligible[m] for m in (n, *self.path(n)))]
        kept = [0, *sorted(order[:nodes])]
        place = {n: at for at, n in enumerate(kept)}
        parents = (-1, *(place[self.parents[n]] for n in kept[1:]))
        lists: list[Any] = [tuple(each[n] for n in kept) for each in (self.values, self.eligible, self.ids)]
        return TokenTree(tuple(self.tokens[n] for n in kept), parents, *lists)


class TreeBuilder:
    """A tree that grows from its root, in which siblings of one token are one node."""

    def __init__(self, pending: int) -> None:
        self._tokens, self._parents, self._values, self._eligible = [pending], [-1], [1.0], [True]
        self._children: dict[tuple[int, int, bool], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, value: float = 1.0, *, eligible: bool = True) -> int:
        """The number of a node, which is added unless it is there. Of two values the larger counts, and the parent's at
        most; only nodes that agree in `eligible` become one.
        """
        value = min(value, self._values[parent])
        found = self._children.get((parent, token, eligible))
        if found is not None:
            self._values[found] = max(self._values[found], value)
            return found
        for each, entry in ((self._tokens, token), (self._parents, parent), (self._values, value)):
            each.append(entry)  # type: ignore[arg-type]
        self._eligible.append(eligible)
        self._children[parent, token, eligible] = len(self._tokens) - 1
        return len(self._tokens) - 1

    def tree(self) -> TokenTree:
        """What has been added so far."""
        lists = (self._tokens, self._parents, self._values, self._eligible)
        return TokenTree(*map(tuple, lists))  # type: ignore[arg-type]


def merge(trees: Sequence[TokenTree]) -> tuple[TokenTree, list[list[int]]]:
    """One tree of all nodes: those that spell the same tokens become one, with the largest of their values.

    Args:
        trees: at least one, all with the same pending token.

    Returns:
        The tree, and for each of `trees` the numbers that its nodes have there.

    Raises:
        InputError: no trees, or different pending tokens.

    Source: Miao et al., "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative
    Inference and Verification", 2023.
    """
    pending = {tree.tokens[0] for tree in trees}
    if len(pending) != 1:
        hint = "proposals for one request begin with its pending token"
        raise InputError("trees", got=f"roots {sorted(pending)}", expected="one root", hint=hint)
    builder = TreeBuilder(pending.pop())
    maps = []
    for tree in trees:
        places = [0]
        for n, up in enumerate(tree.parents[1:], 1):
            places.append(builder.add(places[up], tree.tokens[n], tree.values[n], eligible=tree.eligible[n]))
        maps.append(places)
    return builder.tree(), maps


class TreeBatch(NamedTuple):
    """Trees of a step, one after another, on its device; rows are their nodes.

    Args:
        tokens: int32 (rows,).
        parents: int32 (rows,), the row of the parent; a root's own row for roots.
        depths: int32 (rows,).
        positions: int32 (rows,), length + depth. A token chosen at a row has the position after it.
        trees: int32 (rows,), the tree of each row.
        eligible: bool (rows,); roots are not.
        ancestors: int64 (rows, words), bit n % 64 of word n // 64 says whether a row sees node n of its tree.
        cu: int32 (trees + 1,), the first row of each tree, and the number of rows.
        max_depth, max_nodes: of a tree; known on the host.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    trees: torch.Tensor
    eligible: torch.Tensor
    ancestors: torch.Tensor
    cu: torch.Tensor
    max_depth: int
    max_nodes: int

    @classmethod
    def of(cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device | str = "cpu") -> TreeBatch:
        """Flatten trees and send them to a device, without a wait. Lengths are the tokens before the pending ones; no
        trees are a batch of no rows.
        """
        if len(lengths) != len(trees):
            hint = "a length is the number of tokens before the pending one"
            raise InputError("lengths", got=f"{len(lengths)}", expected=f"{len(trees)}, one a tree", hint=hint)
        cu = [0]
        for tree in trees:
            cu.append(cu[-1] + len(tree.tokens))
        pairs = list(zip(trees, lengths, cu, strict=False))
        widest = max((len(tree.tokens) for tree in trees), default=1)
        lists = [
            [token for tree in trees for token in tree.tokens],
            [first + max(up, 0) for tree, _, first in pairs for up in tree.parents],
            [depth for tree in trees for depth in tree.depths],
            [length + depth for tree, length, _ in pairs for depth in tree.depths],
            [n for n, tree in enumerate(trees) for _ in tree.tokens],
            [int(ok and up >= 0) for tree in trees for ok, up in zip(tree.eligible, tree.parents, strict=True)],
            cu,
        ]
        tokens, parents, depths, positions, of, eligible, starts = send_lists(lists, torch.device(device))
        count = -(-widest // WORD)
        words = send([row for tree in trees for row in tree.words(count)], torch.int64, torch.device(device))
        deepest = max(lists[2], default=0)
        rows = (tokens, parents, depths, positions, of, eligible.bool(), words.view(-1, count))
        return cls(*rows, starts, deepest, widest)
