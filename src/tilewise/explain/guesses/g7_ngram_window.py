"""Guess 7, a window ahead (lookahead decoding, 2024): the model makes n-grams from wrong guesses, and copies those.

Beside each forward the target computes a window of columns. Each column begins with any token and grows by the token
that the target chooses after it: right for the column, though nobody knows yet whether the answer comes that way
(Jacobi iteration). When a column has n tokens, the n-gram goes into a pool, and its first token is dropped. A guess is
an n-gram of the pool that begins with the newest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.explain.guesses.table_model import TableModel, verify
from tilewise.explain.guesses.words import Scene

TRAINED, LOSSLESS, FORMULA = "nothing", True, "words + letters - 1"


def run(
    target: TableModel, prompt: Sequence[int], count: int, *, start: Sequence[int], n: int, most: int = 4
) -> list[int]:
    """`count` tokens after the prompt; `start` has n - 2 tokens that are dropped, then one for each column."""
    text, levels, pool = [*prompt], [[*start]], dict[int, list[list[int]]]()
    while len(text) < len(prompt) + count:
        first, *others = levels  # level 0 begins with the newest token, which is not in it
        columns = range(len(first) + 1)
        window = [[*text, *first[: c + 1]] for c in range(len(first))]
        for height in range(1, len(levels)):
            window += [[*text, *first[:c], *(level[c] for level in others[:height])] for c in columns]
        newest, tops = text[-1], len(columns) - (not others)
        found = verify(target, text, pool.get(newest, []), window)
        last = found.beside[-tops:] if others else [found.tokens[0], *found.beside]
        text += found.tokens
        if len(levels) < n - 1:  # the window is still growing
            levels = [level[1:] for level in levels] + [last[1:]]
            continue
        for c, token in enumerate(last):
            gram = [*(level[c] for level in others), token]
            grams = pool.setdefault(first[c - 1] if c else newest, [])
            grams[:] = [*(each for each in grams if each != gram), gram][-most:]
        levels = [others[0][1:], *others[1:], last]
    return text[len(prompt) :][:count]


def closed_form(words: int, letters: int) -> int:
    """Forwards, if the window begins with the first letters of all words: the first word's letters, then words."""
    return words + letters - 1


def example(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """n-grams as long as a word, and a column for each word."""
    start = [0] * (scene.letters - 2) + [word * scene.letters for word in range(scene.words)]
    return {"start": start, "n": scene.letters}, {"words": scene.count, "letters": scene.letters}


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("ngram_window")
