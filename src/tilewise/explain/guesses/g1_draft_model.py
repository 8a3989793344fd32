"""Guess 1, a draft model (speculative decoding, 2022): a cheaper model writes on, the target checks what it wrote.

The draft writes `length` tokens one by one, at its own price. One forward of the target then checks all of them. If
each guess is right with probability a, whatever came before, the forward emits (1 - a^(length + 1)) / (1 - a) tokens
on average: guess i counts if it and all before it are right, and one more token is always the target's own.
Both models draw with the same noise, so they often draw the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.explain.guesses.table_model import Array, TableModel, chain_forwards, verify
from tilewise.explain.guesses.words import Scene

TRAINED, LOSSLESS, FORMULA = "a draft model", True, "sum of ceil(run / (length + 1))"


def run(target: TableModel, prompt: Sequence[int], count: int, *, draft: TableModel, length: int) -> list[int]:
    """`count` tokens after the prompt."""
    text = [*prompt]
    while len(text) < len(prompt) + count:
        guess: list[int] = []
        while len(guess) < length:
            guess.append(draft.forward([[*text, *guess]])[0].token)
        text += verify(target, text, [guess]).tokens
    return text[len(prompt) :][:count]


def closed_form(right: Sequence[bool], length: int) -> int:
    """Forwards of the target, if it is known at which places of the answer the draft is right."""
    return chain_forwards(right, length)


def expected(a: float, length: int) -> float:
    """Tokens of a forward, if each guess is right with probability a."""
    return float(sum(a**n for n in range(length + 1)))


def agreement(p: Array, q: Array) -> float:
    """How often draws with the same noise are equal: the sum over x of 1 / (sum over y of max(p_y/p_x, q_y/q_x))."""
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))


def example(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """A draft that spells as the target does, and has its own view of which word follows."""
    draft, length = scene.target(table=1), 2 * scene.letters - 1
    right = [draft.choose(draft.state(x), len(x)) == y for x, y in zip(scene.texts(), scene.answer, strict=True)]
    return {"draft": draft, "length": length}, {"right": right, "length": length}


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("draft_model")
