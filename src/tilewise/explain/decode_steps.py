"""What an engine that proposes tokens does step by step: the tree of one request, what was accepted, what came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewise.core.errors import InputError
from tilewise.engine import Engine, SamplingParams
from tilewise.engine.decoding.tree import TokenTree
from tilewise.engine.request import Sample
from tilewise.kv.arguments import check_count

_MARKS = {True: "✓", False: " "}


@dataclass(frozen=True)
class TreeStep:
    """One verification.

    Attributes:
        tree: the proposed tokens; node 0 is the pending one.
        position: of the pending token.
        path: accepted nodes, the root left out.
        chosen: the token that the model chose after each node.
    """

    tree: TokenTree
    position: int
    path: tuple[int, ...]
    chosen: tuple[int, ...]

    @property
    def emitted(self) -> tuple[int, ...]:
        """Tokens that the step gave: accepted ones, and the one after the last of them."""
        last = self.path[-1] if self.path else 0
        return (*(self.tree.tokens[n] for n in self.path), self.chosen[last])

    def lines(self, text: Callable[[int], str]) -> list[str]:
        """The tree, a node a line: position, branch and token, estimated chance, and a mark where it was accepted.

        Args:
            text: how a token is shown.
        """
        tree = self.tree
        children: dict[int, list[int]] = {}
        for n, up in enumerate(tree.parents):
            children.setdefault(up, []).append(n)
        drawn: list[tuple[int, str]] = [(0, "")]
        todo = [(n, "") for n in reversed(children.get(0, []))]
        while todo:
            node, before = todo.pop()
            last = children[tree.parents[node]][-1] == node
            drawn.append((node, before + ("└ " if last else "├ ")))
            todo += [(n, before + ("  " if last else "│ ")) for n in reversed(children.get(node, []))]
        width = max(len(branch + text(tree.tokens[node])) for node, branch in drawn)
        found = []
        for node, branch in drawn:
            words = f"{branch}{text(tree.tokens[node])}".ljust(width)
            mark = _MARKS[node in self.path] if node else "pending"
            value = f"{tree.values[node]:4.2f}" if node else "    "
            found.append(f"{self.position + tree.depths[node]:>6}  {words}  {value}  {mark}".rstrip())
        return found


def trace(
    engine: Engine, prompt: Sequence[int], *, params: SamplingParams | None = None, steps: int = 4
) -> list[TreeStep]:
    """The steps of one request, from the first with something to propose.

    Args:
        engine: one without requests, made with `speculative=`; it has none afterwards.
        prompt: tokens.
        params: how tokens are chosen; None is greedy.
        steps: at most.

    Returns:
        The steps; fewer where the answer ends.

    Raises:
        InputError: no count, an engine in use, or one that proposes nothing.
    """
    check_count("steps", steps, 1)
    if engine.has_unfinished:
        raise InputError("engine", got="one with requests", expected="an idle one", hint="make one for this")
    if engine.config.speculation is None:
        hint = 'EngineConfig(speculative="ngram")'
        raise InputError("engine", got="speculative=None", expected="one that proposes tokens", hint=hint)
    found: list[TreeStep] = []
    took = engine.speculators.took

    def watched(sample: Sample, tree: TokenTree, path: Sequence[int], chosen: Sequence[int]) -> None:
        if found or len(tree.tokens) > 1:
            before = len(sample.tokens) - len(path) - 2  # its tokens are there already
            position = found[-1].position + len(found[-1].emitted) if found else before
            found.append(TreeStep(tree, position, tuple(path), tuple(chosen)))
        took(sample, tree, path, chosen)

    room = engine.max_model_len - len(prompt)
    name = engine.add(prompt, params or SamplingParams(temperature=0.0, max_tokens=max(1, room)))
    engine.speculators.took = watched  # type: ignore[method-assign]
    try:
        while engine.has_unfinished and len(found) < steps:
            engine.step()
    finally:
        del engine.speculators.took
        engine.abort(name)
        while engine.has_unfinished:
            engine.step()
    return found[:steps]
