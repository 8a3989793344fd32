"""`tilewise explain guesses`: small programs that guess tokens and check them in one forward."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import shapes
from tilewise.cli.output import FAILED, guarded, say, say_json, table
from tilewise.explain.guesses import COLUMNS, ORDER, method, play


@guarded
def guess(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[METHOD]...", help="Names of methods; all of them without.")
    ] = None,
    words: Annotated[int, typer.Option(min=2, help="Words of the vocabulary; the prompt has half of them.")] = 8,
    letters: Annotated[int, typer.Option(min=3, help="Tokens of a word.")] = 4,
    count: Annotated[int, typer.Option(min=1, help="Words of the answer.")] = 24,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest word.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    source: Annotated[bool, typer.Option("--source", help="Print the methods' programs too.")] = False,
    as_json: shapes.Json = False,
) -> None:
    """Guess tokens and check them: each method counts forwards of the target and is compared with its formula.

    Exit code 1 if a count differs from its formula, or tokens from those of plain decoding where they must not.

    Example: tilewise explain guesses prompt_copy ngram_window --words 20 --source
    """
    sizes = {"words": words, "letters": letters, "count": count, "temperature": temperature, "seed": seed}
    reports = [play(name, **sizes) for name in names or ORDER]
    if as_json:
        say_json([asdict(report) for report in reports])
    else:
        title = f"{words} words of {letters} letters; an answer of {count * letters} tokens"
        table(title, COLUMNS, [report.cells for report in reports], left=3)
        for name in names or ORDER if source else ():
            say("\n" + Path(str(method(name).__file__)).read_text(encoding="utf-8"))
    if not all(report.ok for report in reports):
        raise typer.Exit(FAILED)
