"""Guess 6, a copy (LLMA and prompt lookup, 2023): what followed the last tokens before may follow them again.

Nothing is trained and nothing is computed: the last tokens are looked up in the prompt and in what has been written,
the longest match first, then the most recent, and what came after it is the guess. A word that stands in the text
already takes one forward. A new one takes a forward for each letter, and is there to copy from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.explain.guesses.table_model import TableModel, verify
from tilewise.explain.guesses.words import Scene

TRAINED, LOSSLESS, FORMULA = "nothing", True, "repeated words + letters * new ones"


def copied(text: Sequence[int], longest: int, length: int) -> list[int]:
    """What followed the longest match of the end of the text."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return [*text[end : end + length]]
    return []


def run(target: TableModel, prompt: Sequence[int], count: int, *, longest: int, length: int) -> list[int]:
    """`count` tokens after the prompt."""
    text = [*prompt]
    while len(text) < len(prompt) + count:
        text += verify(target, text, [copied(text, longest, length)]).tokens
    return text[len(prompt) :][:count]


def closed_form(repeated: int, new: int, letters: int) -> int:
    """Forwards for words that stand in the text already, and for words that do not."""
    return repeated + letters * new


def example(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt has half of the words."""
    new = len({word for word in scene.firsts if word >= scene.words // 2})
    sizes = {"repeated": scene.count - new, "new": new, "letters": scene.letters}
    return {"longest": 2, "length": scene.letters - 1}, sizes


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("prompt_copy")
