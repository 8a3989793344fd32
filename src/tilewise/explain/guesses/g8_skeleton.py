"""Guess 8, a skeleton (Skeleton-of-Thought, 2023): write the points of the answer first, then all of them at once.

This one guesses that points do not depend on each other, and never checks it. First the model writes an outline, here
the first letter of each word. Then a forward computes one row for each point, and each point grows by a token. So the
answer is another one than plain decoding's: no point has seen the text of another. It is a way to ask, not a way to
compute the same text faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.explain.guesses.table_model import TableModel, verify
from tilewise.explain.guesses.words import Scene

TRAINED, LOSSLESS, FORMULA = "nothing", False, "points + letters - 1"


def run(target: TableModel, prompt: Sequence[int], count: int, *, outline: int, point: int, letters: int) -> list[int]:
    """`count` tokens; `outline` and `point` are the marks that ask for an outline and for the rest of a point."""
    text = [*prompt, outline]
    while len(text) < len(prompt) + 1 + count // letters:
        text += verify(target, text, []).tokens
    points = [[first] for first in text[len(prompt) + 1 :]]
    while len(points[0]) < letters:
        rows = target.forward([[*text, point, *each] for each in points])
        points = [[*each, row.token] for each, row in zip(points, rows, strict=True)]
    return [token for each in points for token in each]


def closed_form(points: int, letters: int) -> int:
    """Forwards: one for each point of the outline, and one for each further letter, of all points together."""
    return points + letters - 1


def example(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """As many words as the answer of plain decoding has."""
    mark = scene.words * scene.letters
    options = {"outline": mark, "point": mark + 1, "letters": scene.letters}
    return options, {"points": scene.count, "letters": scene.letters}


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("skeleton")
