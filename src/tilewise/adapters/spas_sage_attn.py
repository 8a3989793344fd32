"""SpargeAttn's functions (package spas_sage_attn), run by tilewise: same names, arguments and layouts.

Arguments become a selection (`tilewise.Sparge`, `tilewise.TopK`) for `select=` and a scheme (`tilewise.Sage`) for
`quantize=`. Tiles have 128 queries and 128 keys on every GPU (SpargeAttn: 128 and 64; on Hopper 64 and 128).

Arguments that SpargeAttn ignores work here or raise an error: `attn_mask` is a mask, `dropout_p` must be 0,
`smooth_k=False` turns smoothing off, and causal masks also apply inside tiles on the diagonal, with SageAttention 2 as
with 1. Only `output_dtype` is ignored, as in SpargeAttn: the output has q's dtype.

Beyond SpargeAttn: any head_dim up to 256 and a head_dim_v, any length, fewer KV heads than query heads, float32, the
CPU, rows that see no key (0, and lse -inf), lse from each function, gradients. A keyword that a function does not have
raises TypeError.

Source: Zhang et al., "SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model Inference",
2025.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters import sageattention as sage
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.ops.attention.choice import Selected
from tilewise.ops.select.problem import SLACK
from tilewise.schedule.tilemap import FULL

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]

Result = torch.Tensor | tuple[Any, Any]
PerHead = float | torch.Tensor
Lam = float | tuple[float, ...] | None
Tiles = Callable[[torch.Tensor, torch.Tensor], Selected | None]  # of q and k (batch, seqlen, heads, dim)
_TILE = (128, 128)
_OWN_TILES = ((128, 64), (64, 128), (128, 128))
_ALL = 50.0  # powers of 2 by which a weight is too small for any sum of float32
_MOST = 2000.0  # powers of 2 by which it is 0 in float64, too


def spas_sage2_attn_meansim_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = 0.6,
    cdfthreshd: PerHead = 0.98,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """SageAttention 2 over the tiles that hold `cdfthreshd` of a softmax over means of tiles.

    Args:
        q: (batch, num_heads_q, seqlen_q, head_dim), or as `tensor_layout` has it.
        k, v: (batch, num_heads_kv, seqlen_k, head_dim and head_dim_v); num_heads_kv divides num_heads_q.
        attn_mask: bool, True for visible pairs, or float, added to the scaled scores; broadcastable to (batch,
            num_heads_q, seqlen_q, seqlen_k).
        dropout_p: must be 0.
        is_causal: query i sees keys 0 to i.
        scale: factor of q k^T; default head_dim ** -0.5.
        smooth_k: centre keys by their mean.
        simthreshd1: tiles with at most this self-similarity are always computed, in [-1, 1]: a number, or a tensor
            (num_heads_q,), which is read on the host.
        cdfthreshd: the share of the softmax, in (0, 1]; a number or a tensor, likewise.
        pvthreshd: a tile is skipped if all its scores are this many powers of 2 below the running maxima of their rows;
            50 or more skips none. A number, or a tensor (num_heads_q,).
        attention_sink: always compute the first tile of keys.
        tensor_layout: "HND" or "NHD".
        output_dtype: accepted, and not used.
        return_sparsity: return (out, sparsity), a float: the share of skipped tiles among those that the mask shows.
        return_lse: return (out, lse).

    Returns:
        out like q with head_dim_v, in the same layout; lse float32 (batch, num_heads_q, seqlen_q).

    Raises:
        InputError: an argument is wrong.
        TypeError: an unknown keyword.

    Example:
        >>> from tilewise.adapters.spas_sage_attn import spas_sage2_attn_meansim_cuda
        >>> out = spas_sage2_attn_meansim_cuda(q, k, v, tensor_layout="NHD", is_causal=True, cdfthreshd=0.9)
    """
    select = _select(_sparge(cdfthreshd, simthreshd1, pvthreshd), attention_sink)
    given = (tensor_layout, is_causal, scale, dropout_p, attn_mask, return_sparsity, return_lse)
    return _attention(q, k, v, select, sage.fastest(q, smooth_k), *given)


def spas_sage2_attn_meansim_topk_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = -0.1,
    cdfthreshd: PerHead | None = None,
    topk: PerHead | None = 0.35,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """SageAttention 2 over a share `topk` of the tiles of keys, those with the best scores of means of tiles.

    Args:
        q, k, v, attn_mask, dropout_p, is_causal, scale, smooth_k, simthreshd1, cdfthreshd, attention_sink,
            tensor_layout, output_dtype, return_sparsity, return_lse: as in `spas_sage2_attn_meansim_cuda`.
        topk: in (0, 1]; a number or a tensor (num_heads_q,). As in SpargeAttn, the share of all tiles of a sequence,
            hidden ones too, rounded down (but 0.35 of 20 are 7, also in float32), at least one. None if `cdfthreshd` is
            given.
        pvthreshd: used with `cdfthreshd` only.

    Returns: as `spas_sage2_attn_meansim_cuda`.

    Raises:
        InputError, TypeError: as `spas_sage2_attn_meansim_cuda`; also for both or none of `topk` and `cdfthreshd`.

    Example:
        >>> from tilewise.adapters.spas_sage_attn import spas_sage2_attn_meansim_topk_cuda
        >>> out = spas_sage2_attn_meansim_topk_cuda(q, k, v, tensor_layout="NHD", topk=0.5)
    """
    select = _select(_top(topk, cdfthreshd, simthreshd1, pvthreshd, k, tensor_layout), attention_sink)
    given = (tensor_layout, is_causal, scale, dropout_p, attn_mask, return_sparsity, return_lse)
    return _attention(q, k, v, select, sage.fastest(q, smooth_k), *given)


def spas_sage_attn_meansim_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = 0.6,
    cdfthreshd: PerHead = 0.98,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """`spas_sage2_attn_meansim_cuda` with SageAttention 1: INT8 scores, scales by block, values in float16.

    Args:
        q, k, v, attn_mask, dropout_p, is_causal, scale, smooth_k, simthreshd1, cdfthreshd, pvthreshd, attention_sink,
            tensor_layout, output_dtype, return_sparsity, return_lse: as in `spas_sage2_attn_meansim_cuda`.

    Returns: as `spas_sage2_attn_meansim_cuda`.

    Raises:
        InputError, TypeError: as `spas_sage2_attn_meansim_cuda`.

    Example:
        >>> from tilewise.adapters.spas_sage_attn import spas_sage_attn_meansim_cuda
        >>> out, lse = spas_sage_attn_meansim_cuda(q, k, v, tensor_layout="NHD", return_lse=True)
    """
    select = _select(_sparge(cdfthreshd, simthreshd1, pvthreshd), attention_sink)
    given = (tensor_layout, is_causal, scale, dropout_p, attn_mask, return_sparsity, return_lse)
    return _attention(q, k, v, select, sage.by_block(smooth_k), *given)


def spas_sage_attn_meansim_topk_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = -0.1,
    cdfthreshd: PerHead | None = None,
    topk: PerHead | None = 0.35,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """`spas_sage2_attn_meansim_topk_cuda` with SageAttention 1: INT8 scores, scales by block, values in float16.

    Args:
        q, k, v, attn_mask, dropout_p, is_causal, scale, smooth_k, simthreshd1, cdfthreshd, topk, pvthreshd,
            attention_sink, tensor_layout, output_dtype, return_sparsity, return_lse: as in
            `spas_sage2_attn_meansim_topk_cuda`.

    Returns: as `spas_sage2_attn_meansim_cuda`.

    Raises:
        InputError, TypeError: as `spas_sage2_attn_meansim_topk_cuda`.

    Example:
        >>> from tilewise.adapters.spas_sage_attn import spas_sage_attn_meansim_topk_cuda
        >>> out = spas_sage_attn_meansim_topk_cuda(q, k, v, tensor_layout="NHD", topk=0.5)
    """
    select = _select(_top(topk, cdfthreshd, simthreshd1, pvthreshd, k, tensor_layout), attention_sink)
    given = (tensor_layout, is_causal, scale, dropout_p, attn_mask, return_sparsity, return_lse)
    return _attention(q, k, v, select, sage.by_block(smooth_k), *given)


def block_sparse_sage2_attn_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_id: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """SageAttention 2 over tiles of your own choice.

    Args:
        q, k, v, dropout_p, scale, smooth_k, pvthreshd, attention_sink, tensor_layout, output_dtype, return_sparsity,
            return_lse: as in `spas_sage2_attn_meansim_cuda`.
        mask_id: bool or integers (batch, num_heads_q, tiles_q, tiles_k), not 0 where a tile is computed; None computes
            all. A tile has 128 queries and 64 keys, or 64 and 128 (SpargeAttn's on Hopper), or 128 and 128: the first
            of these sizes with that many tiles, on any GPU.

    Returns: as `spas_sage2_attn_meansim_cuda`.

    Raises:
        InputError, TypeError: as `spas_sage2_attn_meansim_cuda`.

    Example:
        >>> from tilewise.adapters.spas_sage_attn import block_sparse_sage2_attn_cuda
        >>> tiles = torch.ones(2, 4, 1, 2, dtype=torch.bool)  # of 128 queries and 64 keys
        >>> out = block_sparse_sage2_attn_cuda(q, k, v, tiles, tensor_layout="NHD")
    """
    check_flags(attention_sink=attention_sink)
    select = functools.partial(_given_tiles, mask_id=mask_id, lam=_lam(pvthreshd), attention_sink=attention_sink)
    given = (tensor_layout, False, scale, dropout_p, None, return_sparsity, return_lse)
    return _attention(q, k, v, select, sage.fastest(q, smooth_k), *given)


# what arguments become -----------------------------------------------------------------------------------------------


def _sparge(cdfthreshd: PerHead, simthreshd1: PerHead, pvthreshd: PerHead) -> tw.Sparge:
    tau, theta = _by_head("cdfthreshd", cdfthreshd), _by_head("simthreshd1", simthreshd1)
    return tw.Sparge(tau, theta, _lam(pvthreshd))


def _top(
    topk: PerHead | None,
    cdfthreshd: PerHead | None,
    simthreshd1: PerHead,
    pvthreshd: PerHead,
    k: torch.Tensor,
    tensor_layout: str,
) -> tw.Sparge | tw.TopK:
    if (topk is None) == (cdfthreshd is None):
        got = "neither" if topk is None else "both"
        raise InputError("topk, cdfthreshd", got=got, expected="one of them", hint="leave cdfthreshd out")
    if cdfthreshd is not None:
        return _sparge(cdfthreshd, simthreshd1, pvthreshd)
    _lam(pvthreshd)  # raises what is wrong with it
    assert topk is not None
    shares = _by_head("topk", topk)
    tiles = _tiles(_seqlen(k, tensor_layout), _TILE[1])
    each = shares if isinstance(shares, tuple) else (shares,)
    for share in each:
        if not 0.0 < share <= 1.0:
            raise InputError("topk", got=f"{share}", expected="in (0, 1]", hint="a share of the tiles of keys")
    counts = tuple(max(1, int(share * tiles / SLACK)) for share in each)  # the float32 next to a share may be smaller
    theta = _by_head("simthreshd1", simthreshd1)
    return tw.TopK(counts if isinstance(shares, tuple) else counts[0], theta)


def _select(prediction: tw.Sparge | tw.TopK, attention_sink: bool) -> tw.Select:
    check_flags(attention_sink=attention_sink)
    parts = (prediction, tw.sinks(1)) if attention_sink else (prediction,)
    return tw.Select(*parts, block=_TILE)


def _given_tiles(q: torch.Tensor, k: torch.Tensor, mask_id: Any, lam: Lam, attention_sink: bool) -> Selected | None:
    """The tiles that `mask_id` says, of q and k (batch, seqlen, heads, dim); None where all are computed, whole."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    shapes: list[tuple[int, ...]] = [
        (q.shape[0], q.shape[2], _tiles(seqlen_q, m), _tiles(seqlen_k, n)) for m, n in _OWN_TILES
    ]
    if mask_id is None:
        if lam is None:
            return None
        mask_id = torch.ones(shapes[0], dtype=torch.bool, device=q.device)
    if not isinstance(mask_id, torch.Tensor) or mask_id.is_floating_point() or tuple(mask_id.shape) not in shapes:
        got = f"{mask_id.dtype} {tuple(mask_id.shape)}" if isinstance(mask_id, torch.Tensor) else repr(mask_id)
        hint = "tiles of 128 queries and 64 keys, 64 and 128, or 128 and 128"
        raise InputError("mask_id", got=got, expected=f"bool {' or '.join(map(str, shapes))}", hint=hint)
    kept = mask_id != 0
    if attention_sink:
        kept[..., :1] = True
    classes = torch.full((1, 1, *kept.shape[2:]), FULL, dtype=torch.int8, device=q.device)
    block = _OWN_TILES[shapes.index(tuple(mask_id.shape))]
    return Selected(kept, classes, block, seqlen_q, seqlen_k, "drop", lam)


def _by_head(name: str, value: Any) -> float | tuple[float, ...]:
    """A number, or those of a tensor, which is read on the host."""
    if isinstance(value, torch.Tensor) and value.ndim <= 1:
        return tuple(value.tolist()) if value.ndim else float(value)
    if not isinstance(value, numbers.Real):
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise InputError(name, got=got, expected="a number, or a tensor (num_heads_q,)", hint="one for each query head")
    return float(value)


def _lam(pvthreshd: PerHead) -> Lam:
    """The difference of scores that so many powers of 2 are; None where nothing is left out."""
    powers = _by_head("pvthreshd", pvthreshd)
    each = powers if isinstance(powers, tuple) else (powers,)
    if not all(power > 0.0 for power in each):
        raise InputError("pvthreshd", got=f"{min(each)}", expected="above 0", hint="50 leaves nothing out")
    if all(power >= _ALL for power in each):
        return None
    lams = tuple(min(power, _MOST) * math.log(2.0) for power in each)  # infinity is no lam
    return lams if isinstance(powers, tuple) else lams[0]


def _tiles(seqlen: int, size: int) -> int:
    return -(-seqlen // size)


def _seqlen(x: Any, tensor_layout: str) -> int:
    """0 for what is no tensor of four dimensions, which is refused later."""
    good = isinstance(x, torch.Tensor) and x.ndim == 4
    return x.shape[2 if tensor_layout == "HND" else 1] if good else 0


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    select: tw.Select | Tiles,
    scheme: tw.Sage,
    tensor_layout: str,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    attn_mask: torch.Tensor | None,
    return_sparsity: bool,
    return_lse: bool,
) -> Result:
    check_flags(is_causal=is_causal, return_sparsity=return_sparsity, return_lse=return_lse)
    if dropout_p != 0.0:
        raise InputError("dropout_p", got=f"{dropout_p}", expected="0.0", hint="it is a function for inference")
    if return_sparsity and return_lse:
        got = "both return_sparsity and return_lse"
        raise InputError(
            "return_sparsity", got=got, expected="one of them", hint="tilewise.select_tiles has a density, too"
        )
    sparsity = 0.0

    def attention(*qkv: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal sparsity
        tiles = select if isinstance(select, tw.Select) else select(qkv[0], qkv[1])
        if return_sparsity and tiles is not None:
            if isinstance(tiles, tw.Select):
                formulas = {name: arguments[name] for name in ("mask", "score", "scale")}
                tiles = tw.select_tiles(qkv[0], qkv[1], tiles, **formulas)
            sparsity = 1.0 - float(tiles.density())
        return tw.attention_with_lse(*qkv, select=tiles, **arguments)

    found = sage.attend(q, k, v, scheme, tensor_layout, is_causal, scale, return_lse, attn_mask, attention=attention)
    return (found, sparsity) if return_sparsity else found
