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
    """A mask as a panel, with the tile classes that kernels use.

    Args:
        mask: a `tilewise.Mask`, or a function (b, h, i, j) -> bool.
        seqlen_q, seqlen_k: sequence lengths, at most 2,048: the pairs are evaluated one by one.
        block_m, block_n: queries and keys of a tile.
        batch, head: the batch element and the query head to show.
        title: of the panel; None is the mask's repr.

    Returns:
        A `Panel`, for `tiles` and `query`.

    Raises:
        InputError: a size is out of range.

    Example:
        >>> from tilewise.explain import draw
        >>> draw.panel(tw.causal, seqlen_q=64, seqlen_k=64, block_m=32, block_n=32).classes.tolist()
        [[1, 0], [2, 1]]
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
    """A figure of one mask with its tile classes.

    Args:
        mask, seqlen_q, seqlen_k, block_m, block_n: as in `panel`.
        options: batch, head and title, as in `panel`.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: a size is out of range.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.explain import draw
        >>> figure = draw.mask(tw.causal & tw.window(200), seqlen_q=512, seqlen_k=512)
    """
    sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_m": block_m, "block_n": block_n}
    return masks.tiles([panel(mask, **sizes, **options)], block_m, block_n)
