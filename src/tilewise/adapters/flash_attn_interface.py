"""FlashAttention-3's functions over a cache (module flash_attn_interface), run by tilewise: same names, arguments and
conventions.

`softmax_lse` is -inf for a row that sees no key (FlashAttention-2 has +inf). Beyond FlashAttention-3: any GPU and the
CPU, float32, any head_dim and head_dim_v up to 512, rotary dimensions that are not multiples of 16.

Not supported, with an error that names the argument: `qv`, `attention_chunk`, 8-bit queries and caches. Arguments that
only tune FlashAttention-3's kernels (`scheduler_metadata`, `num_splits`, `pack_gqa`, `sm_margin`) are checked and
change nothing. The partial results of splits, which it returns after `softmax_lse`, are not returned.
Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024).
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.adapters.axes import window_mask
from tilewise.adapters.kv_cache import CacheCall, attend, check_steering
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.flags import check_flags

__all__ = ["flash_attn_with_kvcache", "get_scheduler_metadata"]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As FlashAttention-2's `tilewise.adapters.flash_attn.flash_attn_with_kvcache`, with packed sequences and scales.

    Args:
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, softmax_scale,
            causal, window_size, softcap, rotary_interleaved, return_softmax_lse: as in FlashAttention-2's function.
        qv, attention_chunk: None and 0; other values raise UnsupportedError.
        page_table: FlashAttention-2's `block_table`.
        cu_seqlens_q: int32 (batch + 1,), cumulative lengths of packed queries q (total_q, num_heads_q, head_dim).
        cu_seqlens_k_new: the same of packed new keys k (total_new, num_heads_kv, head_dim) and values.
        max_seqlen_q: accepted with `cu_seqlens_q`, and not used.
        rotary_seqlens: int32 (batch,), the rotary position of the first new token; default cache_seqlens.
        q_descale, k_descale, v_descale: float (batch, num_heads_kv), factors of q, k and v; FlashAttention-3 reads them
            for 8 bits only.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: checked, and not used.

    Returns:
        out, like q with head_dim_v; with `return_softmax_lse` also softmax_lse (batch, num_heads_q, seqlen_q), packed
        (num_heads_q, total_q), float32 (float64 for float64 input), natural logarithm, -inf for a row without keys.

    Raises:
        InputError: an argument is wrong; raised before anything is written.
        UnsupportedError: `qv`, `attention_chunk`, 8 bits; likewise.

    Example:
        >>> from tilewise.adapters.flash_attn_interface import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 128, 2, 16)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
    """
    check_flags(causal=causal, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    if qv is not None:
        hint = "tilewise.attention takes q and k with both parts side by side, up to head_dim 512"
        raise UnsupportedError("qv", got=type(qv).__name__, expected="None", hint=hint)
    if attention_chunk:
        hint = "tilewise.attention(mask=tilewise.chunked(size) & tilewise.causal) has chunks"
        raise UnsupportedError("attention_chunk", got=shown(attention_chunk), expected="0", hint=hint)
    if max_seqlen_q is not None:
        check_steering("max_seqlen_q", max_seqlen_q)
    if scheduler_metadata is not None and not isinstance(scheduler_metadata, torch.Tensor):
        got, hint = type(scheduler_metadata).__name__, "what get_scheduler_metadata returns"
        raise InputError("scheduler_metadata", got=got, expected="a tensor, or None", hint=hint)
    _check_tuning(num_splits, pack_gqa, sm_margin)
    call = CacheCall(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens, descales=(q_descale, k_descale, v_descale), softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved,
        table_name="page_table",
    )  # fmt: skip
    o, lse = attend(call)
    return (o, lse) if return_softmax_lse else o


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """A placeholder for `flash_attn_with_kvcache(scheduler_metadata=)`: tilewise divides work inside each call.

    Args:
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v, page_size,
            max_seqlen_k_new: sizes of the call to come, integers of 0 or more; headdim_v and page_size may be None.
        cache_seqlens: int32 (batch_size,), whose device the result has.
        qkv_dtype, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, has_softcap: accepted, and not used.
        causal, window_size, attention_chunk, num_splits, pack_gqa, sm_margin: checked as by the call.

    Returns:
        int32 (1,), 0.

    Raises:
        InputError: a size is no such integer, or another argument is wrong.
        UnsupportedError: `attention_chunk`.

    Example:
        >>> from tilewise.adapters.flash_attn_interface import get_scheduler_metadata
        >>> get_scheduler_metadata(2, 1, 100, 4, 2, 16, torch.tensor([100, 57], dtype=torch.int32))
        tensor([0], dtype=torch.int32)
    """
    check_flags(causal=causal, has_softcap=has_softcap)
    sizes = {
        "batch_size": batch_size,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv,
        "headdim": headdim,
        "headdim_v": headdim if headdim_v is None else headdim_v,
        "page_size": 1 if page_size is None else page_size,
        "max_seqlen_k_new": max_seqlen_k_new,
    }
    for name, value in sizes.items():
        check_steering(name, value)
    if attention_chunk:
        hint = "flash_attn_with_kvcache refuses it, too"
        raise UnsupportedError("attention_chunk", got=shown(attention_chunk), expected="0", hint=hint)
    window_mask(causal, window_size)
    _check_tuning(num_splits, pack_gqa, sm_margin)
    if not isinstance(cache_seqlens, torch.Tensor) or cache_seqlens.shape != (batch_size,):
        got = tuple(cache_seqlens.shape) if isinstance(cache_seqlens, torch.Tensor) else type(cache_seqlens).__name__
        expected = f"an int32 tensor ({batch_size},)"
        raise InputError("cache_seqlens", got=got, expected=expected, hint="a length for each request")
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def _check_tuning(num_splits: Any, pack_gqa: Any, sm_margin: Any) -> None:
    """Raise InputError for what FlashAttention-3's kernels could not be tuned with."""
    check_steering("num_splits", num_splits)
    check_steering("sm_margin", sm_margin)
    if pack_gqa is not None:
        check_flags(pack_gqa=pack_gqa)
