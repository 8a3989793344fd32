"""Guess 2, heads for a block (blockwise parallel decoding, 2018): the model that checks also guesses the next block.

Head i reads the state before the newest token and guesses the token i places after the newest one. The forward that
checks a block has that state, so the heads guess the next block in the same forward, and no second model is needed.
The price: a head does not know the newest token, nor what the heads before it guessed. Where a word has just been
drawn, it can only name the most frequent one. Then a word takes two forwards, and one if that was the word.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.explain.guesses.table_model import TableModel, verify
from tilewise.explain.guesses.words import Scene

TRAINED, LOSSLESS, FORMULA = "heads", True, "2 words - guessed words"

Heads = list[list[list[int]]]  # head, state, rank -> token


def ideal(target: TableModel, heads: int, best: int = 1) -> Heads:
    """What training aims at: each head's likeliest tokens in each state, by the exact distribution."""
    p = target.probabilities
    step = np.stack([np.bincount(to, row, minlength=len(p)) for to, row in zip(target.moves, p, strict=True)])
    ahead = (np.linalg.matrix_power(step, n) @ p for n in range(1, heads + 1))
    return [[[x for x in np.argsort(-row, kind="stable")[:best].tolist() if row[x] > 0] for row in q] for q in ahead]


def run(target: TableModel, prompt: Sequence[int], count: int, *, heads: Heads) -> list[int]:
    """`count` tokens after the prompt."""
    text, guess = [*prompt], list[int]()
    while len(text) < len(prompt) + count:
        found = verify(target, text, [guess])
        text += found.tokens
        guess = [head[found.state][0] for head in heads]
    return text[len(prompt) :][:count]


def closed_form(words: int, guessed: int) -> int:
    """Forwards for words whose letters are certain, of which some were the most frequent ones at their place."""
    return 2 * words - guessed


def example(scene: Scene, best: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Heads for the rest of a word and one token more, as good as heads can be."""
    target, letters, firsts = scene.target(), scene.letters, scene.firsts
    likely = np.argsort(-target.probabilities[letters - 1 :: letters], axis=1, kind="stable")[:, :best] // letters
    guessed = sum(word in likely[before] for before, word in itertools.pairwise(firsts))
    return {"heads": ideal(target, letters - 1, best)}, {"words": scene.count, "guessed": guessed}


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("block_heads")
