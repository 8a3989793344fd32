"""Eight methods that guess tokens and check them in one forward: small programs that count the target's forwards.

Each method is one file: `run(...)` decodes, `closed_form(...)` is the formula that its count obeys. `python -m
tilewise.explain.guesses` runs them all on one text; `python -m tilewise.explain.guesses.g6_prompt_copy` runs one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.core.errors import InputError
from tilewise.explain.guesses.words import Scene

ORDER: tuple[str, ...] = (
    "draft_model",
    "block_heads",
    "head_tree",
    "draft_tree",
    "feature_head",
    "prompt_copy",
    "ngram_window",
    "skeleton",
)
COLUMNS = ("method", "trained", "lossless", "tokens/forward", "rows/forward", "forwards", "closed form", "")


@dataclass(frozen=True)
class Report:
    """One method, run: its tokens and counts, and what its closed form says.

    Attributes:
        method: a name in ORDER.
        trained: what has to be trained for it.
        lossless: whether it promises plain decoding's tokens.
        same: whether it gave them.
        tokens: of the answer.
        forwards, rows: of the target, and rows in all of them.
        predicted: forwards by the closed form.
        formula: the closed form in words.

    Example:
        >>> from tilewise.explain.guesses import play
        >>> report = play("prompt_copy", count=6)
        >>> report.same, report.forwards == report.predicted
        (True, True)
    """

    method: str
    trained: str
    lossless: bool
    same: bool
    tokens: int
    forwards: int
    rows: int
    predicted: int
    formula: str

    @property
    def ok(self) -> bool:
        """Whether it kept its promise and its count is that of the closed form."""
        return self.forwards == self.predicted and (self.same or not self.lossless)

    @property
    def cells(self) -> tuple[str, ...]:
        """The report as a line of a table, by COLUMNS."""
        verdict = "" if self.ok else "WRONG"
        per = (f"{each / self.forwards:.2f}" for each in (self.tokens, self.rows))
        lossless = "yes" if self.lossless else "no"
        counts = (str(self.forwards), f"{self.predicted} = {self.formula}")
        return (self.method.replace("_", " "), self.trained, lossless, *per, *counts, verdict)


def method(name: str) -> Any:
    """The module of a method, with its functions `run` and `closed_form`.

    Args:
        name: a name in ORDER.

    Returns:
        The module.

    Raises:
        InputError: an unknown name.

    Example:
        >>> from tilewise.explain.guesses import method
        >>> method("prompt_copy").closed_form(repeated=20, new=4, letters=4)
        36
    """
    if name not in ORDER:
        hint = "tilewise explain lists them"
        raise InputError("method", got=name, expected=f"one of: {', '.join(ORDER)}", hint=hint)
    return importlib.import_module(f"{__name__}.g{ORDER.index(name) + 1}_{name}")


def play(name: str, **sizes: Any) -> Report:
    """Decode one answer by one method, and compare its tokens with plain decoding's and its count with the closed form.

    Args:
        name: a name in ORDER.
        sizes: of the `Scene`: `words`, `letters`, `count`, `temperature`, `seed`.

    Returns:
        A `Report`.

    Raises:
        InputError: an unknown name, or a size out of range.

    Example:
        >>> from tilewise.explain.guesses import play
        >>> play("ngram_window", count=10, letters=4).forwards  # for 40 tokens
        13
    """
    module, scene = method(name), Scene(**sizes)
    options, facts = module.example(scene)
    target = scene.target()
    answer = module.run(target, scene.prompt, scene.tokens, **options)
    return Report(
        method=name,
        trained=module.TRAINED,
        lossless=module.LOSSLESS,
        same=answer == scene.answer,
        tokens=len(answer),
        forwards=target.forwards,
        rows=target.rows,
        predicted=module.closed_form(**facts),
        formula=module.FORMULA,
    )


def as_text(reports: Sequence[Report]) -> str:
    """Reports as a table.

    Args:
        reports: its lines.

    Returns:
        The table, without a newline at its end.

    Example:
        >>> from tilewise.explain.guesses import as_text, play
        >>> as_text([play("skeleton")]).splitlines()[1].split()[:3]
        ['skeleton', 'nothing', 'no']
    """
    lines = [COLUMNS, *(report.cells for report in reports)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(COLUMNS))]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(row.rstrip() for row in rows)


def show(name: str) -> None:
    """Print one method's report at the default sizes."""
    print(as_text([play(name)]))
