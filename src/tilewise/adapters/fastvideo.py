"""FastVideo's `sliding_tile_attention` (package fastvideo_kernel, before that st_attn), run by tilewise: same name,
arguments and layout.

Arguments become a mask, `tilewise.sliding_tile`, and all heads run in one launch, whatever their windows.

Beyond FastVideo: any canvas, also one that tiles do not divide (`tilewise.TokenOrder` brings tokens into tile order,
with tiles cut at the far border), any tile, any text, a text length for each batch element, fewer heads of keys and
values than of queries, any head_dim up to 512, float32, the CPU, and gradients. Keywords that it does not have are
TypeErrors.

Source: Zhang et al., "Fast Video Generation with Sliding Tile Attention", 2025.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import check_tensors, seqlen_first
from tilewise.core.errors import InputError

__all__ = ["sliding_tile_attention"]

Window = tuple[int, int, int]


def sliding_tile_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: Sequence[Sequence[int]],
    text_length: int | torch.Tensor,
    has_text: bool = True,
    seq_shape: str = "30x48x80",
    *,
    tile_size: tuple[int, int, int] = (6, 8, 8),
) -> torch.Tensor:
    """Attention of a video, tile after tile, with text behind it.

    A query of the video sees the tiles of its window, shifted inside at the border, and the first `text_length` tokens
    of text; a query of the text sees the whole video and these.

    Args:
        q: (batch, num_heads_q, seqlen, head_dim); seqlen is the video's tokens, in tile order, and those of text, which
            may be padded.
        k, v: (batch, num_heads_kv, seqlen, head_dim and head_dim_v); num_heads_kv divides num_heads_q.
        window_size: for each query head (frames, height, width) in tiles. As theirs has it, an even number sees one
            tile more, and one beyond the canvas all of them.
        text_length: how many tokens of text are no padding; an integer tensor (batch,) for each batch element.
        has_text: whether text lies behind the video; without it `text_length` is not looked at.
        seq_shape: the video's extents "FxHxW", of any size.
        tile_size: extents of a tile; theirs is this one.

    Returns:
        out like q with head_dim_v, in the same layout; rows of padded text see what text sees.

    Raises:
        InputError: an argument is wrong. TypeError: a keyword that is not here.
    """
    shape = "(batch, heads, seqlen, dim)"
    check_tensors(shape, (4,), "heads stand before tokens", q=q, k=k, v=v)
    canvas = _canvas(seq_shape)
    words = q.shape[2] - math.prod(canvas)
    if words < 0 or (words and not has_text) or k.shape[2] != q.shape[2]:
        expected = f"q and k of {math.prod(canvas)} tokens" + (" and those of text" if has_text else "")
        hint = f"seq_shape={seq_shape!r} is the video's; text stands behind it with has_text=True"
        raise InputError("q", got=f"seqlens {q.shape[2]} and {k.shape[2]}", expected=expected, hint=hint)
    windows = _windows(window_size, q.shape[1])
    mask = _mask(canvas, tuple(tile_size), windows, words, _valid(text_length, words, q), q.device)
    if isinstance(text_length, torch.Tensor) and words:
        mask = mask & tw.lengths(text_length + math.prod(canvas))
    return tw.attention(*(seqlen_first(x) for x in (q, k, v)), mask=mask).transpose(1, 2)


@functools.lru_cache(maxsize=256)
def _mask(
    canvas: Window, tile: Window, windows: tuple[Window, ...], words: int, valid: int, device: torch.device
) -> tw.Mask:
    """The mask of a call: made once, since layers and steps repeat it."""
    grid = [-(-size // extent) for size, extent in zip(canvas, tile, strict=True)]
    seen = [tuple(min(side | 1, count) for side, count in zip(window, grid, strict=True)) for window in windows]
    mask = tw.sliding_tile(canvas, tile, seen, text=words, device=device)  # type: ignore[arg-type]
    end = math.prod(canvas) + valid
    return mask & tw.mask(lambda b, h, i, j: j < end, f"text({valid})") if valid < words else mask


def _canvas(seq_shape: Any) -> Window:
    sides = seq_shape.split("x") if isinstance(seq_shape, str) else []
    if len(sides) != 3 or not all(side.isdecimal() and int(side) for side in sides):
        hint = "frames, height and width of the latent video"
        raise InputError("seq_shape", got=repr(seq_shape), expected='"FxHxW", such as "30x48x80"', hint=hint)
    frames, height, width = map(int, sides)
    return frames, height, width


def _windows(window_size: Any, heads: int) -> tuple[Window, ...]:
    windows = [] if isinstance(window_size, str) or not hasattr(window_size, "__len__") else list(window_size)
    whole = all(isinstance(w, Sequence) and len(w) == 3 and all(type(n) is int and n > 0 for n in w) for w in windows)
    if len(windows) != heads or not whole:
        expected = f"{heads} windows (frames, height, width) in tiles, one for each head of q"
        hint = f"of one window for all: [(3, 3, 3)] * {heads}"
        raise InputError("window_size", got=repr(window_size), expected=expected, hint=hint)
    return tuple((w[0], w[1], w[2]) for w in windows)


def _valid(text_length: Any, words: int, q: torch.Tensor) -> int:
    """How many tokens of text any element of the batch may have."""
    if isinstance(text_length, torch.Tensor) or not words:
        if words and (text_length.shape != q.shape[:1] or text_length.is_floating_point()):
            expected = f"an integer tensor ({q.shape[0]},), or one number"
            got = f"{text_length.dtype} {tuple(text_length.shape)}"
            raise InputError("text_length", got=got, expected=expected, hint="a length for each batch element")
        return words
    if type(text_length) is not int or not 0 <= text_length <= words:
        hint = "text stands behind the video, and what is behind its text_length tokens is padding"
        raise InputError("text_length", got=repr(text_length), expected=f"an integer from 0 to {words}", hint=hint)
    return text_length
