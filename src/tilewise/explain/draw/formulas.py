"""Masks written as formulas, turned into panels: evaluated for the pairs, classified for the tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain.draw import masks


def panel(
    mask: Any,
    *,
    seqlen_q: int,
    seqlen_k: int,
    block_m: int,
    block_n: int,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
) -> masks.Panel:
    """A `tilewise.Mask` (or a function of b, h, i, j) as a panel, for one batch index and query head.

    The pairs are evaluated one by one, so keep the sizes to what a picture can show (at most 2,048 a side). The tile
    classes are those the kernels use. `title` defaults to the mask's repr.
    """
    import torch

    from tilewise.formula import as_mask
    from tilewise.formula.sizes import made_for
    from tilewise.schedule.tilemap import TileMap

    if not 1 <= min(seqlen_q, seqlen_k) <= max(seqlen_q, seqlen_k) <= 2048:
        got, hint = (seqlen_q, seqlen_k), "TileMap.build classifies longer ones, without a picture"
        raise InputError("seqlen_q, seqlen_k", got=got, expected="sizes in [1, 2048]", hint=hint)
    formula = as_mask(mask)
    sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_m": block_m, "block_n": block_n}
    sizes["batch"] = made_for(formula.sizes, "batch", batch + 1)
    sizes["heads"] = made_for(formula.sizes, "num_heads_q", head + 1)
    classes: torch.Tensor = TileMap.build(formula, **sizes).classes
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    symbols: dict[str, Any] = {"b": torch.tensor(batch), "h": torch.tensor(head), "i": i, "j": torch.arange(seqlen_k)}
    visible = formula.evaluate(**symbols).expand(seqlen_q, seqlen_k).numpy().astype(bool)
    tiles = classes[min(batch, classes.shape[0] - 1), min(head, classes.shape[1] - 1)]
    return masks.Panel(title or repr(formula), visible, tiles.cpu().numpy().astype(np.int8))


def mask(mask: Any, *, seqlen_q: int, seqlen_k: int, block_m: int = 128, block_n: int = 128, **options: Any) -> Any:
    """A figure of one mask with its tile classes: `tiles` on the panel of `mask`; options as in `panel`."""
    sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_m": block_m, "block_n": block_n}
    return masks.tiles([panel(mask, **sizes, **options)], block_m, block_n)
