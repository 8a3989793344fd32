"""Attention over a cache that grows in place, as FlashAttention's `flash_attn_with_kvcache` has it: what its second and
third version share.

A `CacheCall` (`call`) is checked whole (`check`) before a key is written; then new keys are rotated on the way into the
cache, queries rotated, and one `tilewise.attention` runs over pages. A contiguous cache is one, too: each row is a
page. With left padding every token is a page of its own, since what lies before a sequence's first token may be
anything, NaN too.
"""

from __future__ import annotations

import torch

import tilewise as tw
from tilewise.adapters.axes import unit_stride
from tilewise.adapters.kv_cache.call import CacheCall, int32, step_of, stride_of
from tilewise.adapters.kv_cache.check import check, check_steering
from tilewise.rotary import rotated

__all__ = ["CacheCall", "attend", "check_steering"]

State = tuple[torch.Tensor, torch.Tensor]


def attend(call: CacheCall) -> State:
    """(o, lse) as tilewise has them, after the new keys and values are in the cache. No gradients.

    Raises InputError and UnsupportedError before anything is written. Values are read on a CPU, and on a GPU with
    TILEWISE_DEBUG=1.
    """
    with torch.no_grad():
        mask, score, scale = check(call)
        q = unit_stride(call.q)
        if call.k is not None:
            flat = q if q.ndim == 3 else q.flatten(0, 1)
            k, v = (unit_stride(x if x.ndim == 3 else x.flatten(0, 1)) for x in (call.k, call.v))
            rope = None
            if call.rotary_cos is not None:
                tables = (unit_stride(call.rotary_cos), unit_stride(call.rotary_sin))
                of_queries, rope = (tw.Rope(*tables, places, call.rotary_interleaved) for places in call.places)
                q = rotated(flat, of_queries).to(q.dtype).view(q.shape)
                if k.dtype == torch.float64:
                    k, rope = rotated(k, rope), None
            tw.kv_write(_bits(k), _bits(v), _bits(call.k_cache), _bits(call.v_cache), call.slots, rope=rope)
        k, v, table, seqlens = call.k_cache, call.v_cache, call.table, call.seqlens
        if call.cache_leftpad is not None:
            k, v, table, seqlens = _tokens(call)
        cu_seqlens_q = None if call.cu_seqlens_q is None else int32(call.cu_seqlens_q)
        layout = tw.Paged(table, seqlens, cu_seqlens_q)
        o, lse = tw.attention_with_lse(q, k, v, mask=mask, score=score, layout=layout, scale=scale)
        factor = call.descales[2]
        if factor is not None:
            of_heads = factor.to(torch.promote_types(o.dtype, torch.float32)).repeat_interleave(call.group, 1)
            o = (o * (of_heads[:, None] if o.ndim == 4 else of_heads[call.queries[0]])[..., None]).to(o.dtype)
        return o, lse


def _bits(x: torch.Tensor) -> torch.Tensor:
    """What is copied; `kv_write` has no float64, but two halves of it are copied as well."""
    return x.view(torch.float32) if x.dtype == torch.float64 else x


def _tokens(call: CacheCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache in pages of one token, with a table and lengths that begin behind the left padding."""
    k, v = call.k_cache, call.v_cache
    step = step_of(k)
    count = (k.shape[0] - 1) * step + k.shape[1]
    k, v = (x.as_strided((count, 1, *x.shape[2:]), (stride_of(x), stride_of(x), *x.stride()[2:])) for x in (k, v))
    pad = int32(call.cache_leftpad)
    at = (pad[:, None] + torch.arange(call.capacity, device=call.device)).clamp(max=call.capacity - 1)
    page = call.table.long().gather(1, at // call.page_size)
    return k, v, (page * step + at % call.page_size).to(torch.int32), call.seqlens - pad
