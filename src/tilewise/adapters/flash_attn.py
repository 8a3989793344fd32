"""FlashAttention-2's functions (package flash_attn), run by tilewise: same names, arguments and conventions.

Tensors are (batch, seqlen, heads, dim), packed ones (total, heads, dim). Causal masks, windows and ALiBi are aligned to
the bottom right; `window_size=(left, right)` is inclusive on both sides and -1 is unlimited; `softmax_lse` is +inf for
a row that sees no key. Beyond FlashAttention-2: any head_dim up to 512 and head_dim_v, float32, CPU, softcap together
with dropout, gradients of `alibi_slopes` and through `softmax_lse`.

Two differences: with ALiBi, `softmax_lse` is that of s - slope * |i - j|, whereas FlashAttention-2's causal kernel
omits the constant slope * i of the row; `S_dmask` is returned for any dropout, and its extents are not rounded up to
multiples of 128.
Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023).
"""

from __future__ import annotations

import math
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import check_cu_seqlens, check_tensors, distance_score, unit_stride, unpacked, window_mask
from tilewise.adapters.kv_cache import CacheCall, attend
from tilewise.adapters.s_dmask import extent, gathered, probabilities
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.layouts import Packed, Paged

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """FlashAttention-2's `flash_attn_func`.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim).
        k, v: (batch, seqlen_k, num_heads_kv, head_dim and head_dim_v); num_heads_kv divides num_heads_q.
        dropout_p: probability with which a weight is dropped.
        softmax_scale: factor of q k^T; default head_dim ** -0.5.
        causal: hide keys after the query; with window_size, as right = 0.
        window_size: (left, right): query i sees keys i - left to i + right, -1 for no limit on a side.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q): -slope * |i - j| is added, after softcap.
        deterministic: refuse anything whose bits could differ between runs.
        return_attn_probs: return (out, softmax_lse, S_dmask). For debugging: S_dmask takes O(seqlen_q * seqlen_k).

    Returns:
        out, like q with head_dim_v; softmax_lse (batch, num_heads_q, seqlen_q), float32 (float64 for float64 input),
        natural logarithm, +inf for a row that sees no key; S_dmask (batch, num_heads_q, seqlen_q, seqlen_k), the
        probabilities, negative (or -0) where dropped.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: on a GPU, deterministic with slopes that take a gradient.

    Example:
        >>> from tilewise.adapters.flash_attn import flash_attn_func
        >>> out = flash_attn_func(q, k, v, causal=True, window_size=(31, 0))
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attention(q, k, v, None, options)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As `flash_attn_func`, with k and v in one tensor.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim).
        kv: (batch, seqlen_k, 2, num_heads_kv, head_dim): keys, then values.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns: as `flash_attn_func`.

    Raises:
        InputError, UnsupportedError: as `flash_attn_func`.

    Example:
        >>> from tilewise.adapters.flash_attn import flash_attn_kvpacked_func
        >>> out = flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True)
    """
    k, v = unpacked("kv", kv, 2, 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attention(q, k, v, None, options)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As `flash_attn_func`, with q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim): queries, keys, values.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns: as `flash_attn_func`.

    Raises:
        InputError, UnsupportedError: as `flash_attn_func`.

    Example:
        >>> from tilewise.adapters.flash_attn import flash_attn_qkvpacked_func
        >>> out = flash_attn_qkvpacked_func(torch.stack((k, k, v), 2), causal=True)
    """
    q, k, v = unpacked("qkv", qkv, 3, 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attention(q, k, v, None, options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """As `flash_attn_func`, for sequences of different lengths, concatenated.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k, v: (total_k, num_heads_kv, head_dim and head_dim_v), or with `block_table` pages of any size, (num_blocks,
            page_size, num_heads_kv, ...), forward only.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), cumulative lengths from 0 to the totals.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences, int or tensor; only S_dmask needs them.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.
        block_table: int32 (batch, max_pages), the pages of each sequence.

    Returns:
        out (total_q, num_heads_q, head_dim_v); softmax_lse (num_heads_q, total_q); S_dmask (batch, num_heads_q,
        max_seqlen_q, max_seqlen_k), 0 beyond a sequence's lengths.

    Raises:
        InputError, UnsupportedError: as `flash_attn_func`.

    Example:
        >>> from tilewise.adapters.flash_attn import flash_attn_varlen_func
        >>> cu_seqlens = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, cu_seqlens, 70, 70, causal=True)
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    layout = Packed(cu_seqlens_q, cu_seqlens_k)
    return _attention(q, k, v, layout, options, (max_seqlen_q, max_seqlen_k), block_table)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As `flash_attn_varlen_func`, with k and v in one tensor.

    Args:
        q: (total_q, num_heads_q, head_dim).
        kv: (total_k, 2, num_heads_kv, head_dim): keys, then values.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns: as `flash_attn_varlen_func`.

    Raises:
        InputError, UnsupportedError: as `flash_attn_func`.

    Example:
        >>> from tilewise.adapters.flash_attn import flash_attn_varlen_kvpacked_func
        >>> cu = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> out = flash_attn_varlen_kvpacked_func(q[0], torch.stack((k[0], v[0]), 1), cu, cu, 70, 70)
    """
    k, v = unpacked("kv", kv, 2, 4)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attention(q, k, v, Packed(cu_seqlens_q, cu_seqlens_k), options, (max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As `flash_attn_varlen_func`, with q, k and v in one tensor.

    Args:
        qkv: (total, 3, num_heads, head_dim): queries, keys, values.
        cu_seqlens, max_seqlen: of queries and keys, as in `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns: as `flash_attn_varlen_func`.

    Raises:
        InputError, UnsupportedError: as `flash_attn_func`.

    Example:
        >>> from tilewise.adapters.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> cu = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> out = flash_attn_varlen_qkvpacked_func(torch.stack((k[0], k[0], v[0]), 1), cu, 70, causal=True)
    """
    q, k, v = unpacked("qkv", qkv, 3, 4)
    check_cu_seqlens(cu_seqlens=cu_seqlens)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attention(q, k, v, Packed(cu_seqlens), options, (max_seqlen, max_seqlen))


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Write new keys and values into a cache, in place, and attend to the whole cache. No gradients.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim); the last query has the position of the last key.
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim and head_dim_v), or with `block_table`
            (num_blocks, page_size, num_heads_kv, ...) of any page size; unit stride in the last dimension.
        k, v: (batch, seqlen_new, num_heads_kv, ...), written at tokens cache_seqlens and following of each request.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), by which the first rotary_dim dimensions of new keys and of
            queries are rotated: token t of the cache by row t. Query i has position cache_seqlens + i if `causal` or
            with a window, else all have position cache_seqlens. Only with k and v.
        cache_seqlens: tokens already in the cache, those of the left padding included: an int, or int32 (batch,); None
            is a full cache.
        cache_batch_idx: int32 (batch,), the row of the cache of each request; default 0, 1, 2, ...
        cache_leftpad: int32 (batch,), the first token of each request; the padding before it is not read.
        block_table: int32 (batch, max_pages), the pages of each request; entries after its last one are not read.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        rotary_interleaved: rotate dimensions 0 and 1, 2 and 3, ...; else 0 and rotary_dim / 2, 1 and the next, ...
        num_splits: changes nothing; 0 or more.
        return_softmax_lse: return (out, softmax_lse).

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim_v); softmax_lse (batch, num_heads_q, seqlen_q), float32 (float64 for
        float64 input), natural logarithm, +inf for a row that sees no key.

    Raises:
        InputError: an argument is wrong, or a token would be written twice; before anything is written. Values are
            checked on a CPU, and on a GPU with TILEWISE_DEBUG=1.
        UnsupportedError: 8 bits, or left padding in a cache whose batch stride is no multiple of its token stride.

    Example:
        >>> from tilewise.adapters.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 128, 2, 16)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
    """
    check_flags(causal=causal, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    call = CacheCall(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes, num_splits=num_splits,
    )  # fmt: skip
    o, lse = attend(call)
    return (o, torch.where(lse == -torch.inf, torch.inf, lse)) if return_softmax_lse else o


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Packed | None,
    options: tuple[Any, ...],
    max_seqlens: tuple[Any, Any] = (0, 0),
    block_table: torch.Tensor | None = None,
) -> Result:
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs = options
    check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    mask = window_mask(causal, window_size)
    if layout is None:
        hint = "flash_attn_varlen_func takes (total, heads, dim)"
        check_tensors("(batch, seqlen, heads, dim)", (4,), hint, q=q, k=k, v=v)
    else:
        check_cu_seqlens(cu_seqlens_q=layout.cu_seqlens_q, cu_seqlens_k=layout.keys)
        hint = "flash_attn_func takes (batch, seqlen, heads, dim)"
        check_tensors("(total, heads, dim)", (3,), hint, q=q)
        if block_table is None:
            check_tensors("(total, heads, dim)", (3,), hint, k=k, v=v)
        else:
            check_tensors("(batch, max_pages)", (2,), "a row for each sequence", block_table=block_table)
            check_tensors("(num_blocks, page_size, heads, dim)", (4,), "pages of block_table", k=k, v=v)
            if block_table.shape[0] != layout.batch:
                got, expected = f"{block_table.shape[0]} rows", f"{layout.batch}, as cu_seqlens_q"
                raise InputError("block_table", got=got, expected=expected, hint="a row for each sequence")
    if return_attn_probs:
        max_seqlens = (extent("max_seqlen_q", max_seqlens[0]), extent("max_seqlen_k", max_seqlens[1]))
    q, k, v = (unit_stride(x) for x in (q, k, v))
    batch = layout.batch if layout is not None else q.shape[0]
    score = distance_score(softcap, alibi_slopes, batch, q.shape[-2])
    seed = None
    if return_attn_probs and dropout_p:  # drawn here so that S_dmask shows the same pattern
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=q.device)
    paged: Packed | Paged | None = layout
    if layout is not None and block_table is not None:
        paged = Paged(block_table, layout.keys.diff(), layout.cu_seqlens_q)
    o, lse = tw.attention_with_lse(
        q,
        k,
        v,
        mask=mask,
        score=score,
        layout=paged,
        scale=softmax_scale,
        dropout=dropout_p,
        seed=seed,
        deterministic=deterministic,
    )
    if not return_attn_probs:
        return o
    with torch.no_grad():
        if layout is not None and block_table is not None:
            k = gathered(k, block_table, layout.keys.diff().tolist())
        scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
        probs = probabilities((q, k, lse), layout, mask, score, scale, (dropout_p, seed), max_seqlens)
    return o, torch.where(lse == -torch.inf, torch.inf, lse), probs
