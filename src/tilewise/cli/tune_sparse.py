"""`tilewise tune-sparse`: how few tiles attention over queries, keys and values of yours can do with."""

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
    """What stands for tiles that are not taken."""

    drop = "drop"
    summary = "summary"
    summary2 = "summary2"


@guarded
def tune_sparse(
    files: dumps.Files = None,
    demo: dumps.Demo = False,
    layout: dumps.LayoutOf = dumps.Layout.bshd,
    out: tuning.Out = Path("selections.json"),
    max_error: Annotated[float, typer.Option(help="Largest relative L1 error of a head to accept.")] = 0.05,
    block: Annotated[str, typer.Option(metavar="TOKENS", help="Queries and keys of a tile: 128, or 128,64.")] = "128",
    far: Annotated[Far, typer.Option(help="What stands for tiles that are not taken.")] = Far.drop,
    lam: Annotated[
        float | None, typer.Option(help="Of Sparge, for heads that keep --max-error with it. Default: none.")
    ] = None,
    tiles: Annotated[
        int | None, typer.Option(min=1, help="Tiles of queries to look at, spread evenly. Default: all.")
    ] = None,
    causal: shapes.Causal = False,
    mask: shapes.MaskText = None,
    scale: shapes.Scale = None,
    device: shapes.Device = None,
    seconds: tuning.Seconds = 0.2,
    as_json: shapes.Json = False,
) -> None:
    """Find what `attention(select=)` may leave out, head by head, by your own q, k and v.

    One pass over all scores of a layer shows what each tile's weights are. Thresholds of `Sparge` for each head are
    then those that compute the fewest tiles, of those whose error to attention over all tiles stays within --max-error;
    samples of a batch must all keep it. `tilewise.load_selections` reads the file that is written; files of the same
    settings are gone on with.

    Example: tilewise tune-sparse layer0.pt layer1.pt --causal --max-error 0.05
    """
    where = shapes.device(device)
    seen = dumps.mask_of(causal, mask, demo, where)
    sizes = shapes.lengths(block, "--block")
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
