"""FastVideo's `sliding_tile_attention`, `video_sparse_attn` and `block_sparse_attn` (package fastvideo_kernel, before
that st_attn and vsa), run by tilewise: same names, arguments and layout.

Arguments become a mask (`tilewise.sliding_tile`) or a selection of tiles (`attention(select=)`); all heads run in one
launch.

Beyond FastVideo: any canvas, also one whose extents are not multiples of the tile's (`tilewise.TokenOrder` puts tokens
into tile order, with smaller tiles at the end of each axis), any tile, any number of text tokens, a text length per
batch element, blocks of any size, fewer KV heads than query heads, any head_dim up to 512, float32, the CPU, and
gradients of all. A keyword that FastVideo does not have raises TypeError.

Sources: Zhang et al., "Fast Video Generation with Sliding Tile Attention", 2025; Zhang et al., "VSA: Faster Video
Diffusion with Trainable Sparse Attention", 2025.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import check_tensors, seqlen_first
from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.core.readback import host_range, values_checked
from tilewise.ops.attention.choice import Selected
from tilewise.ops.tile_means import tile_means
from tilewise.schedule.tilemap import FULL

__all__ = ["block_sparse_attn", "sliding_tile_attention", "video_sparse_attn"]

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
    """Sliding tile attention over a video in tile order, with text after it.

    A query of the video sees the tiles of its window, which is shifted inside at the border, and the first
    `text_length` tokens of text. A query of the text sees the whole video and these tokens.

    Args:
        q: (batch, num_heads_q, seqlen, head_dim); seqlen is the video's tokens, in tile order, and those of text, which
            may be padded.
        k, v: (batch, num_heads_kv, seqlen, head_dim and head_dim_v); num_heads_kv divides num_heads_q.
        window_size: for each query head (frames, height, width) in tiles. As in FastVideo, an even number means one
            tile more, and a number beyond the canvas all tiles.
        text_length: number of text tokens without padding; or an integer tensor (batch,), whose values are checked on a
            CPU.
        has_text: whether text follows the video; if False, `text_length` is not used.
        seq_shape: the video's extents "FxHxW", of any size.
        tile_size: extents of a tile; FastVideo has only the default.

    Returns:
        out like q with head_dim_v, in the same layout; queries of padded text see what other text sees.

    Raises:
        InputError: an argument is wrong.
        TypeError: an unknown keyword.

    Example:
        >>> from tilewise.adapters.fastvideo import sliding_tile_attention
        >>> query, key, value = torch.randn(3, 1, 2, 12 * 8 * 8 + 10, 16)  # a video and 10 tokens of text
        >>> out = sliding_tile_attention(query, key, value, [(1, 1, 1), (2, 1, 1)], 10, seq_shape="12x8x8")
    """
    check_flags(has_text=has_text)
    shape = "(batch, heads, seqlen, dim)"
    check_tensors(shape, (4,), "heads stand before tokens", q=q, k=k, v=v)
    canvas = _canvas(seq_shape)
    words = q.shape[2] - math.prod(canvas)
    if words < 0 or (words and not has_text) or k.shape[2] != q.shape[2]:
        expected = f"q and k of {math.prod(canvas)} tokens" + (" and those of text" if has_text else "")
        hint = f"seq_shape={seq_shape!r} is the video's; text stands behind it with has_text=True"
        raise InputError("q", got=f"seqlens {q.shape[2]} and {k.shape[2]}", expected=expected, hint=hint)
    windows = _windows(window_size, q.shape[1])
    mask = _mask(canvas, _tile(tile_size), windows, words, _valid(text_length, words, q), q.device)
    if isinstance(text_length, torch.Tensor) and words:
        mask = mask & tw.lengths(_wide(text_length) + math.prod(canvas))
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
        raise InputError("seq_shape", got=shown(seq_shape), expected='"FxHxW", such as "30x48x80"', hint=hint)
    frames, height, width = map(int, sides)
    return frames, height, width


def _windows(window_size: Any, heads: int) -> tuple[Window, ...]:
    windows = [] if isinstance(window_size, str) or not hasattr(window_size, "__len__") else list(window_size)
    whole = all(isinstance(w, Sequence) and len(w) == 3 and all(type(n) is int and n > 0 for n in w) for w in windows)
    if len(windows) != heads or not whole:
        expected = f"{heads} windows (frames, height, width) in tiles, one for each head of q"
        hint = f"of one window for all: [(3, 3, 3)] * {heads}"
        raise InputError("window_size", got=shown(window_size), expected=expected, hint=hint)
    return tuple((w[0], w[1], w[2]) for w in windows)


def _tile(tile_size: Any) -> Window:
    sides = list(tile_size) if isinstance(tile_size, Sequence) and not isinstance(tile_size, str) else []
    if len(sides) != 3 or not all(type(side) is int and side > 0 for side in sides):
        hint = "FastVideo's are (6, 8, 8)"
        raise InputError("tile_size", got=shown(tile_size), expected="three integers >= 1", hint=hint)
    return sides[0], sides[1], sides[2]


def _valid(text_length: Any, words: int, q: torch.Tensor) -> int:
    """How many tokens of text any element of the batch may have."""
    if not words:
        return 0
    if isinstance(text_length, torch.Tensor):
        if text_length.shape != q.shape[:1] or not _holds_integers(text_length):
            expected = f"an integer tensor ({q.shape[0]},), or one number"
            got = f"{text_length.dtype} {tuple(text_length.shape)}"
            raise InputError("text_length", got=got, expected=expected, hint="a length for each batch element")
        _check_values("text_length", _wide(text_length), words, "text stands behind the video, and padding behind text")
        return words
    if type(text_length) is not int or not 0 <= text_length <= words:
        hint = "text stands behind the video, and what is behind its text_length tokens is padding"
        raise InputError("text_length", got=shown(text_length), expected=f"an integer from 0 to {words}", hint=hint)
    return text_length


def _holds_integers(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The integers in 32 bits or more: fewer may not hold their sum with the tokens of a video."""
    return x if x.dtype in (torch.int32, torch.int64) else x.to(torch.int64)


def _check_values(name: str, x: torch.Tensor, most: int, hint: str) -> None:
    """Raise InputError where integers are not from 0 to `most`, unless a GPU has to be waited for to know."""
    ends = host_range(x) if values_checked(x.device) else None
    if ends is not None and (ends[0] < 0 or ends[1] > most):
        raise InputError(name, got=f"numbers from {ends[0]} to {ends[1]}", expected=f"0 to {most}", hint=hint)


# blocks of a video ---------------------------------------------------------------------------------------------------


def video_sparse_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variable_block_sizes: torch.Tensor,
    q_variable_block_sizes: torch.Tensor,
    topk: int,
    block_size: int | Sequence[int] = 64,
    compress_attn_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over means of blocks, plus attention over all tokens of the blocks with the best scores.

    Args:
        q: (batch, num_heads_q, seqlen_q, head_dim), block after block, each padded to the same size with zeros.
        k, v: (batch, num_heads_kv, seqlen_k, head_dim and head_dim_v), likewise; num_heads_kv divides num_heads_q.
        variable_block_sizes, q_variable_block_sizes: integer tensors (blocks,), the number of tokens before the padding
            in each block of keys, and of queries; values are checked on a CPU.
        topk: number of blocks of keys for each block of queries.
        block_size: tokens of a block, or its extents.
        compress_attn_weight: factor of the attention over means, of any floating-point dtype, broadcastable to the
            result; None is 1.

    Returns:
        The sum, (batch, num_heads_q, seqlen_q, head_dim_v), in q's dtype, differentiable in q, k, v and the weight; the
        choice of blocks has no gradient. Scores of blocks are float32 (float64 for float64); FastVideo may round them
        to the tensors' dtype.

    Raises:
        InputError: an argument is wrong.
        TypeError: an unknown keyword.

    Example:
        >>> from tilewise.adapters.fastvideo import video_sparse_attn
        >>> query, key, value = torch.randn(3, 1, 2, 4 * 64, 16)
        >>> sizes = torch.full((4,), 64)  # four blocks without padding
        >>> out = video_sparse_attn(query, key, value, sizes, sizes, topk=2)
    """
    size = _block_tokens(block_size)
    _check_blocks(q, k, v, variable_block_sizes, q_variable_block_sizes, size)
    blocks = k.shape[2] // size
    if type(topk) is not int or not 1 <= topk <= blocks:
        hint = "of the blocks of keys; all of them is attention over all tokens"
        raise InputError("topk", got=shown(topk), expected=f"an integer from 1 to {blocks}", hint=hint)
    _check_weight(compress_attn_weight, (*q.shape[:3], v.shape[3]))
    of_q, of_k, of_v = (
        _means_of_blocks(x, sizes, size)
        for x, sizes in ((q, q_variable_block_sizes), (k, variable_block_sizes), (v, variable_block_sizes))
    )
    known = tw.mask(lambda b, h, i, j: variable_block_sizes[j] > 0, "blocks with tokens")
    coarse = tw.attention(*(x.transpose(1, 2).to(q.dtype) for x in (of_q, of_k, of_v)), mask=known)
    scores = of_q.detach() @ of_k.detach().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scores = scores.masked_fill(variable_block_sizes <= 0, -torch.inf)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk).indices, True)
    fine, _ = block_sparse_attn(q, k, v, taken, variable_block_sizes)
    spread = coarse.transpose(1, 2).repeat_interleave(size, 2)
    return fine + (spread if compress_attn_weight is None else (spread * compress_attn_weight).to(fine.dtype))


def block_sparse_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_map: torch.Tensor, variable_block_sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of blocks of queries over the blocks of keys that a map shows them.

    Args:
        q, k, v: as for `video_sparse_attn`.
        block_map: bool (batch, num_heads_q, blocks of queries, blocks of keys), True for visible blocks; a block has
            seqlen_k / (blocks of keys) tokens.
        variable_block_sizes: integer tensor (blocks,), the number of tokens before the padding in each block of keys;
            values are checked on a CPU.

    Returns:
        out (batch, num_heads_q, seqlen_q, head_dim_v), and lse (batch, num_heads_q, seqlen_q), float32.

    Raises:
        InputError: an argument is wrong.
        TypeError: an unknown keyword.

    Example:
        >>> from tilewise.adapters.fastvideo import block_sparse_attn
        >>> query, key, value = torch.randn(3, 1, 2, 4 * 64, 16)
        >>> own = torch.eye(4, dtype=torch.bool).expand(1, 2, 4, 4)  # each block sees itself
        >>> out, lse = block_sparse_attn(query, key, value, own, torch.full((4,), 64))
    """
    check_tensors("(batch, heads, seqlen, dim)", (4,), "heads stand before tokens", q=q, k=k, v=v)
    columns = block_map.shape[-1] if isinstance(block_map, torch.Tensor) and block_map.ndim == 4 else 0
    size = k.shape[2] // columns if columns else 0
    expected = (q.shape[0], q.shape[1], q.shape[2] // max(size, 1), columns)
    if not columns or block_map.dtype != torch.bool or tuple(block_map.shape) != expected or k.shape[2] % columns:
        got = f"{block_map.dtype} {tuple(block_map.shape)}" if isinstance(block_map, torch.Tensor) else repr(block_map)
        hint = "blocks of queries and of keys have as many tokens"
        raise InputError("block_map", got=got, expected="bool (batch, heads, blocks of q, blocks of k)", hint=hint)
    _check_blocks(q, k, v, variable_block_sizes, None, size)
    classes = torch.full((1, 1, *block_map.shape[2:]), FULL, dtype=torch.int8, device=q.device)
    select = Selected(block_map, classes, (size, size), q.shape[2], k.shape[2], "drop", math.inf)
    valid = tw.mask(lambda b, h, i, j: j % size < variable_block_sizes[j // size], "tokens that are no padding")
    out, lse = tw.attention_with_lse(*(seqlen_first(x) for x in (q, k, v)), mask=valid, select=select)
    return out.transpose(1, 2), lse


def _means_of_blocks(x: torch.Tensor, sizes: torch.Tensor, size: int) -> torch.Tensor:
    """Means (batch, heads, blocks, dim) over the tokens of blocks that are no padding."""
    means = tile_means(seqlen_first(x), size)[0]
    return means * (size / sizes.clamp(min=1).to(means.dtype))[:, None]


def _check_weight(weight: Any, shape: tuple[int, ...]) -> None:
    """Raise InputError unless it can multiply a result of this shape."""
    if weight is None:
        return
    good = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.ndim <= len(shape)
    # from the last dimension on, as PyTorch broadcasts
    if not good or not all(of in (1, n) for of, n in zip(reversed(weight.shape), reversed(shape), strict=False)):
        got = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else repr(weight)
        expected = f"a floating-point tensor {shape}, or broadcastable to it"
        raise InputError("compress_attn_weight", got=got, expected=expected, hint="a factor for each number of out")


def _block_tokens(block_size: Any) -> int:
    sides = [block_size] if type(block_size) is int else list(block_size) if isinstance(block_size, Sequence) else []
    if not sides or not all(type(side) is int and side > 0 for side in sides):
        hint = "64 tokens, or (4, 4, 4)"
        raise InputError("block_size", got=shown(block_size), expected="an integer >= 1, or extents", hint=hint)
    return math.prod(sides)


def _check_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_k: Any, of_q: Any, size: int) -> None:
    """Raise InputError unless sequences are whole blocks, of which each has a number of tokens."""
    check_tensors("(batch, heads, seqlen, dim)", (4,), "heads stand before tokens", q=q, k=k, v=v)
    given = [("variable_block_sizes", of_k, "k", k)]
    given += [] if of_q is None else [("q_variable_block_sizes", of_q, "q", q)]
    for name, sizes, of, x in given:
        if x.shape[2] % size:
            hint = "fill blocks up with zeros"
            raise InputError(of, got=f"seqlen {x.shape[2]}", expected=f"whole blocks of {size} tokens", hint=hint)
        shape = (x.shape[2] // size,)
        if not isinstance(sizes, torch.Tensor) or sizes.shape != shape or sizes.dtype not in (torch.int32, torch.int64):
            got = f"{sizes.dtype} {tuple(sizes.shape)}" if isinstance(sizes, torch.Tensor) else repr(sizes)
            raise InputError(name, got=got, expected=f"an integer tensor {shape}", hint="one number for each block")
        _check_values(name, sizes, size, "how many tokens of a block are no padding")
