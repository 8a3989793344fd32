"""Several proposers at once: their trees become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.core.errors import InputError
from tilewise.engine.decoding.proposers.base import Proposer
from tilewise.engine.decoding.tree import TokenTree, merge
from tilewise.kv.arguments import check_count


class MergedProposer:
    """The most valuable nodes of all proposers' trees, where equal paths are one.

    Args:
        parts: the proposers; each is offered the whole budget.

    Source: Miao et al., "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative
    Inference and Verification", 2023.
    """

    def __init__(self, parts: Sequence[Proposer]) -> None:
        if not parts:
            raise InputError("parts", got="none", expected="at least one proposer", hint="pass a list of proposers")
        self._parts, self._maps, self._ids = list(parts), list[list[int]](), list[tuple[int, ...]]()

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """As `Proposer`."""
        check_count("budget", budget, 0)
        trees = [part.propose(context, budget) for part in self._parts]
        merged, self._maps = merge(trees)
        self._ids = [tree.ids for tree in trees]
        return merged.cut(budget)

    def observe(self, chosen: Mapping[int, int]) -> None:
        """As `Proposer`: each part gets what was chosen after its own nodes."""
        for part, places, ids in zip(self._parts, self._maps, self._ids, strict=True):
            part.observe({own: chosen[at] for own, at in zip(ids, places, strict=True) if at in chosen})
