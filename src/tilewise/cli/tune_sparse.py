"""`tilewise tune-sparse`: how many tiles attention needs on your q, k and v."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

import tilewise
from tilewise.cli import dumps, shapes, tuning
from tilewise.cli.output import guarded
from tilewise.core.errors import InputError
from tilewise.explain import sparsity


class Far(str, Enum):
    """What replaces tiles that are not computed."""

    drop = "drop"
    summary = "summary"
    summary2 = "summary2"


@guarded
def tune_sparse(
    files: dumps.Files = None,
    demo: dumps.Demo = False,
    layout: dumps.LayoutOf = dumps.Layout.bshd,
    out: tuning.Out = Path("selections.json"),
    max_error: Annotated[float, typer.Option(help="Largest relative L1 error to accept in a head.")] = 0.05,
    block: Annotated[str, typer.Option(metavar="TOKENS", help="Queries and keys of a tile: 128, or 128,64.")] = "128",
    far: Annotated[
        Far, typer.Option(help="What replaces tiles that are not computed: nothing, or a summary of each.")
    ] = Far.drop,
    lam: Annotated[
        float | None,
        typer.Option(help="lam of Sparge, used by heads that stay within --max-error with it. Default: none."),
    ] = None,
    tiles: Annotated[
        int | None, typer.Option(min=1, help="Tiles of queries to examine, evenly spaced. Default: all.")
    ] = None,
    causal: shapes.Causal = False,
    mask: shapes.MaskText = None,
    scale: shapes.Scale = None,
    device: shapes.Device = None,
    seconds: tuning.Seconds = 0.2,
    as_json: shapes.Json = False,
) -> None:
    """Find thresholds of block-sparse attention (`attention(select=)`) for each head, from your own q, k and v.

    One pass over all scores of a layer measures the weight of each tile. Each head then gets the thresholds of `Sparge`
    that compute the fewest tiles while its error, against attention over all tiles, stays within --max-error in every
    sample of the batch. `tilewise.load_selections` reads the file that is written. An interrupted run resumes if the
    settings are the same.

    Example: tilewise tune-sparse layer0.pt layer1.pt --causal --max-error 0.05
    """
    where = shapes.device(device)
    seen = dumps.mask_of(causal, mask, demo, where)
    sizes = [int(x) if x.strip().isdecimal() and len(x) < shapes.MOST_DIGITS else 0 for x in block.split(",")]
    if len(sizes) > 2 or min(sizes) < 1:
        hint = "128, or 128,64 for tiles of 128 queries and 64 keys"
        raise InputError("--block", got=repr(block), expected="one or two integers >= 1", hint=hint)
    formulas: dict[str, Any] = {"mask": seen, "scale": scale}
    tile: dict[str, Any] = {"block": (sizes[0], sizes[-1]), "far": far.value, "lam": lam}

    def look(tensors: dumps.Tensors, clock: tuning.Clock) -> dict[str, Any]:
        q, k, v = tensors
        fit = sparsity.fit_sparge(q, k, v, max_error, tiles=tiles, **tile, **formulas)
        found, select = asdict(fit), fit.select(**tile)
        given = {"tau": found.pop("tau"), "theta": found.pop("theta"), **tile, "lam": select.skip}
        found["ms"] = clock(lambda: tilewise.attention(*tensors, select=select, **formulas))
        found["ms_of_all"] = clock(lambda: tilewise.attention(*tensors, **formulas))
        return {"select": given, "found": found}

    shown = None if seen is None else repr(seen)
    settings = {"max_error": max_error, **tile, "tiles": tiles, "scale": scale, "mask": shown}
    document = tuning.Document(out, settings, where, seconds)
    document.look_at(dumps.layers("tune-sparse", files, demo, layout, where), look)
    document.show(as_json)
