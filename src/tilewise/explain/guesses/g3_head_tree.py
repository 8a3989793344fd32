"""Guess 3, a tree of heads (Medusa, 2024): each head names several tokens, and all paths through them are checked.

The heads are those of guess 2. With b tokens of each, there are b^i paths through i heads; equal beginnings share
rows, so the paths are a tree. The forward computes more rows, and a word is guessed if it is among the b most frequent
ones. If head i's tokens contain the right one with probability a_i, it emits 1 + a_1 + a_1 a_2 + ... on average.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.explain.guesses import g2_block_heads
from tilewise.explain.guesses.g2_block_heads import Heads
from tilewise.explain.guesses.table_model import TableModel, verify
from tilewise.explain.guesses.words import Scene

TRAINED, LOSSLESS, FORMULA = "heads", True, "2 words - guessed words"
BEST = 3


def run(target: TableModel, prompt: Sequence[int], count: int, *, heads: Heads) -> list[int]:
    """`count` tokens after the prompt."""
    text, guesses = [*prompt], list[tuple[int, ...]]()
    while len(text) < len(prompt) + count:
        found = verify(target, text, guesses)
        text += found.tokens
        guesses = list(itertools.product(*(head[found.state] for head in heads)))
    return text[len(prompt) :][:count]


def closed_form(words: int, guessed: int) -> int:
    """Forwards for words whose letters are certain, of which some were among the most frequent ones at their place."""
    return 2 * words - guessed


def expected(a: Sequence[float]) -> float:
    """Tokens of a forward, if the right token is among those of head i with probability a[i]."""
    return float(1 + np.cumprod(a).sum())


def example(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """As guess 2, with the three likeliest tokens of each head."""
    return g2_block_heads.example(scene, BEST)


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("head_tree")
