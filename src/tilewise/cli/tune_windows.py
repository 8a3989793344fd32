"""`tilewise tune-windows`: a window over a grid of tokens for each head, from your q and k."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilewise
from tilewise.cli import dumps, shapes, tuning
from tilewise.cli.output import guarded
from tilewise.explain import sparsity

GRID = "Grid"


class TokenOrder(str, Enum):
    """Order of a grid's tokens in the sequence."""

    tile = "tile"
    hilbert = "hilbert"
    raster = "raster"


@guarded
def tune_windows(
    canvas: Annotated[str, typer.Option(metavar="T,H,W", help="Extents of the grid.", rich_help_panel=GRID)],
    files: dumps.Files = None,
    layout: dumps.LayoutOf = dumps.Layout.bshd,
    out: tuning.Out = Path("selections.json"),
    tile: Annotated[str, typer.Option(metavar="T,H,W", help="Extents of a tile.", rich_help_panel=GRID)] = "6,8,8",
    order: Annotated[
        TokenOrder, typer.Option(help="Order of the grid's tokens in the sequence.", rich_help_panel=GRID)
    ] = TokenOrder.tile,
    text: Annotated[int, typer.Option(min=0, help="Text tokens, after those of the grid.", rich_help_panel=GRID)] = 0,
    text_first: Annotated[
        bool, typer.Option("--text-first", help="Text tokens come before those of the grid.", rich_help_panel=GRID)
    ] = False,
    window: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T,H,W",
            help="A window to try, in tiles; may be repeated. Default: all with odd extents, and the whole grid.",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Largest share of all pairs that the heads may compute, on average.")
    ] = 0.3,
    scale: shapes.Scale = None,
    device: shapes.Device = None,
    seconds: tuning.Seconds = 0.2,
    as_json: shapes.Json = False,
) -> None:
    """Choose a window of `sliding_tile` for each head, so that all heads of all layers together lose the least weight.

    One pass over all scores of a layer measures the weight outside each window; windows are then chosen within
    --budget. Another budget needs no other pass. `tilewise.load_selections` reads the file that is written.

    Example: tilewise tune-windows layer0.pt layer1.pt --canvas 30,48,80 --tile 6,8,8 --text 256 --budget 0.2
    """
    where = shapes.device(device)
    extents, each = (tuple(shapes.lengths(x, name)) for x, name in ((canvas, "--canvas"), (tile, "--tile")))
    grid = sparsity.Canvas(extents, each, order.value, text, text_first)
    grid.tile_of()  # raises what is wrong with it
    windows = [tuple(shapes.lengths(x, "--window")) for x in window or []] or grid.windows()
    costs = sparsity.window_costs(grid, windows)  # and with them
    settings = {"grid": asdict(grid), "windows": windows, "scale": scale}
    document = tuning.Document(out, settings, where, seconds)
    given = dumps.layers("tune-windows", files, False, layout, where)

    def look(tensors: dumps.Tensors, clock: tuning.Clock) -> dict[str, Any]:
        return {"losses": sparsity.window_losses(*tensors[:2], grid, windows, scale=scale).tolist()}

    document.look_at(given, look)
    losses = torch.tensor([row for layer in document.layers for row in layer["losses"]])
    chosen = iter(sparsity.spend(losses, costs, budget))
    for layer in document.layers:
        taken = [next(chosen) for _ in layer["losses"]]
        layer["mask"] = {**asdict(grid), "windows": [windows[n] for n in taken]}
        lost = [row[n] for row, n in zip(layer["losses"], taken, strict=True)]
        layer["found"] = {"density": costs[taken].tolist(), "lost": lost}
    for source in given:
        layer = next(kept for kept in document.layers if kept["name"] == source.name)
        mask = grid.mask(layer["mask"]["windows"], where)

        def measure(tensors: dumps.Tensors, clock: tuning.Clock, mask: tilewise.Mask = mask) -> dict[str, Any]:
            return {
                "errors": sparsity.window_errors(*tensors, mask, scale=scale),
                "ms": clock(lambda: tilewise.attention(*tensors, mask=mask, scale=scale)),
                "ms_of_all": clock(lambda: tilewise.attention(*tensors, scale=scale)),
            }

        layer["found"].update(document.named(source, measure))
    document.write()
    document.show(as_json)
