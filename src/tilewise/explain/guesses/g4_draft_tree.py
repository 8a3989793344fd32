"""Guess 4, a tree of drafts (SpecInfer, 2023): several small models write on, and all they wrote is checked at once.

Small models have different gaps. One forward checks the texts of all of them as one tree, in which equal beginnings
share rows; it goes as far as the best of them, without knowing which that is. The paper trains each model on what the
others get wrong. Here each knows some words: a word that one of them knows takes one forward, any other one a forward
for each letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.explain.guesses.table_model import TableModel, verify
from tilewise.explain.guesses.words import Scene, forget

TRAINED, LOSSLESS, FORMULA = "draft models", True, "known words + letters * unknown ones"


def run(
    target: TableModel, prompt: Sequence[int], count: int, *, drafts: Sequence[TableModel], length: int
) -> list[int]:
    """`count` tokens after the prompt."""
    text = [*prompt]
    while len(text) < len(prompt) + count:
        guesses: list[list[int]] = [[] for _ in drafts]
        for draft, guess in zip(drafts, guesses, strict=True):
            while len(guess) < length:
                guess.append(draft.forward([[*text, *guess]])[0].token)
        text += verify(target, text, guesses).tokens
    return text[len(prompt) :][:count]


def closed_form(known: int, unknown: int, letters: int) -> int:
    """Forwards for words that some draft knows, and for words that none does."""
    return known + letters * unknown


def example(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two drafts that know every third word, the second one those after the first one's."""
    drafts = [forget(scene.target(), (w for w in range(scene.words) if w % 3 != n), scene.letters) for n in range(2)]
    known = sum(word % 3 < 2 for word in scene.firsts)
    sizes = {"known": known, "unknown": scene.count - known, "letters": scene.letters}
    return {"drafts": drafts, "length": scene.letters - 1}, sizes


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("draft_tree")
