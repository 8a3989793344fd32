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
import numbers
from itertools import pairwise
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import check_tensors, distance_score, unit_stride, window_mask
from tilewise.adapters.kv_cache import CacheCall, attend
from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.core.philox import keep_mask
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
        InputError: an argument is wrong. UnsupportedError: on a GPU, deterministic with slopes that take a gradient.
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
    """As `flash_attn_func`, with k and v in one tensor kv (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    k, v = _split("kv", kv, 2, 5)
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
    """As `flash_attn_func`, with q, k and v in one tensor qkv (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = _split("qkv", qkv, 3, 5)
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
    """As `flash_attn_func`, for sequences of different lengths, one after another.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k, v: (total_k, num_heads_kv, head_dim and head_dim_v), or with `block_table` pages of any size, (num_blocks,
            page_size, num_heads_kv, ...), forward only.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), cumulative lengths from 0 to the totals.
        max_seqlen_q, max_seqlen_k: accepted, int or tensor; only S_dmask needs them.
        block_table: int32 (batch, max_pages), the pages of each sequence.

    Returns:
        out (total_q, num_heads_q, head_dim_v); softmax_lse (num_heads_q, total_q); S_dmask (batch, num_heads_q,
        max_seqlen_q, max_seqlen_k), 0 beyond a sequence's lengths.
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
    """As `flash_attn_varlen_func`, with k and v in one tensor kv (total_k, 2, num_heads_kv, head_dim)."""
    k, v = _split("kv", kv, 2, 4)
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
    """As `flash_attn_varlen_func`, with q, k and v in one tensor qkv (total, 3, num_heads, head_dim)."""
    q, k, v = _split("qkv", qkv, 3, 4)
    _check_lengths(cu_seqlens=cu_seqlens)
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
    """Write new keys and values into a cache, in place, and attend to all that is there then. No gradients.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim); the last query stands at the last key.
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim and head_dim_v), or with `block_table`
            (num_blocks, page_size, num_heads_kv, ...) of any page size; unit stride in the last dimension.
        k, v: (batch, seqlen_new, num_heads_kv, ...), written at tokens cache_seqlens and following of each request.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), by which the first rotary_dim dimensions of new keys and of
            queries are rotated: token t of the cache by row t. Query i stands at cache_seqlens + i if `causal` or with
            a window, else all queries at cache_seqlens. Only with k and v.
        cache_seqlens: tokens already in the cache, those of the left padding included: an int, or int32 (batch,); None
            is a full cache.
        cache_batch_idx: int32 (batch,), the row of the cache of each request; default 0, 1, 2, ...
        cache_leftpad: int32 (batch,), the first token of each request that is there; whatever lies before is not read.
        block_table: int32 (batch, max_pages), the pages of each request; what lies behind its last one is not read.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        rotary_interleaved: rotate dimensions 0 and 1, 2 and 3, ...; else 0 and rotary_dim / 2, 1 and the next, ...
        num_splits: changes nothing; 0 or more.
        return_softmax_lse: return (out, softmax_lse).

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim_v); softmax_lse (batch, num_heads_q, seqlen_q), float32 (float64 for
        float64 input), natural logarithm, +inf for a row that sees no key.

    Raises:
        InputError: an argument is wrong. UnsupportedError: 8 bits, or left padding in a cache whose rows are no whole
        number of tokens apart. Both before any write; values are checked on a CPU only, where no token may be written
        twice, and on a GPU with TILEWISE_DEBUG=1.
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


def _split(name: str, packed: torch.Tensor, parts: int, rank: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(packed, torch.Tensor) or packed.ndim != rank or packed.shape[-3] != parts:
        got = f"shape {tuple(packed.shape)}" if isinstance(packed, torch.Tensor) else type(packed).__name__
        lead = "(batch, seqlen" if rank == 5 else "(total"
        hint = f"torch.stack of the {parts} tensors along dimension {rank - 3}"
        raise InputError(name, got=got, expected=f"{lead}, {parts}, heads, head_dim)", hint=hint)
    return packed.unbind(-3)


def _check_lengths(**cu_seqlens: Any) -> None:
    """Raise InputError unless each is a tensor of rank 1; `attention` looks at the rest."""
    hint = "running sums of the lengths: torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)"
    check_tensors("(batch + 1,)", (1,), hint, **cu_seqlens)


def _extent(name: str, value: Any) -> int:
    """A length given as an integer or a tensor of one."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()
    if not one and (not isinstance(value, (int, numbers.Integral)) or isinstance(value, bool)):
        hint = "the longest sequence; only S_dmask needs it"
        raise InputError(name, got=shown(value), expected="an integer, or an integer tensor of one element", hint=hint)
    return int(value)


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
        _check_lengths(cu_seqlens_q=layout.cu_seqlens_q, cu_seqlens_k=layout.keys)
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
        max_seqlens = (_extent("max_seqlen_q", max_seqlens[0]), _extent("max_seqlen_k", max_seqlens[1]))
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
            k = _gathered(k, block_table, layout.keys.diff().tolist())
        scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
        probs = _probabilities((q, k, lse), layout, mask, score, scale, (dropout_p, seed), max_seqlens)
    return o, torch.where(lse == -torch.inf, torch.inf, lse), probs


def _gathered(k: torch.Tensor, block_table: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Keys out of their pages, packed."""
    tables = [row[: -(-n // k.shape[1])].long() for row, n in zip(block_table, lengths, strict=True)]
    return torch.cat([k[row].flatten(0, 1)[:n] for row, n in zip(tables, lengths, strict=True)])


def _probabilities(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: Packed | None,
    mask: tw.Mask | None,
    score: tw.Score | None,
    scale: float,
    dropout: tuple[float, torch.Tensor | None],
    max_seqlens: tuple[int, int],
) -> torch.Tensor:
    """S_dmask, every probability materialised."""
    q, k, lse = tensors
    if layout is None:
        parts = [(b, q[b], k[b], lse[b]) for b in range(q.shape[0])]
        extents = (q.shape[1], k.shape[1])
    else:
        cu_q, cu_k = layout.cu_seqlens_q.tolist(), layout.keys.tolist()
        rows = [slice(a, b) for a, b in pairwise(cu_q)]
        keys = [slice(a, b) for a, b in pairwise(cu_k)]
        parts = [(b, q[r], k[c], lse[:, r]) for b, (r, c) in enumerate(zip(rows, keys, strict=True))]
        extents = max_seqlens
        longest = tuple(max((b - a for a, b in pairwise(ends)), default=0) for ends in (cu_q, cu_k))
        for name, got, least in zip(("max_seqlen_q", "max_seqlen_k"), extents, longest, strict=True):
            if got < least:
                hint = "max(lengths); only S_dmask needs it"
                raise InputError(name, got=got, expected=f"at least {least}, the longest sequence", hint=hint)
    heads = q.shape[-2]
    result = torch.zeros(len(parts), heads, *extents, dtype=q.dtype, device=q.device)
    for b, q_b, k_b, lse_b in parts:
        seqlen_q, seqlen_k = q_b.shape[0], k_b.shape[0]
        if not seqlen_q or not seqlen_k:
            continue
        h = torch.arange(heads, device=q.device)[:, None, None]
        i = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)[:, None]
        j = torch.arange(seqlen_k, device=q.device)
        batch = torch.tensor(b, device=q.device)
        wide = lse.dtype
        k_b = k_b.repeat_interleave(heads // k_b.shape[1], 1)
        s = torch.einsum("ihd,jhd->hij", q_b.to(wide), k_b.to(wide)) * scale
        s = s if score is None else score.evaluate(dtype=wide, s=s, b=batch, h=h, i=i, j=j)
        p = torch.exp(s - lse_b[..., None])
        visible = torch.tensor(True, device=q.device) if mask is None else mask.evaluate(b=batch, h=h, i=i, j=j)
        p = torch.where(visible & (lse_b[..., None] != -torch.inf), p, 0.0)
        if dropout[1] is not None:
            keep = keep_mask(int(dropout[1]), dropout[0], b * heads + h, i, j)
            p = torch.where(keep, p, -p)
        result[b, :, :seqlen_q, :seqlen_k] = p.to(q.dtype)
    return result
