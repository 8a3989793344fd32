"""What is looked at before a call of `flash_attn_with_kvcache` writes anything."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import check_index, check_tensors, distance_score, window_mask
from tilewise.adapters.kv_cache.call import CacheCall, step_of
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.overlap import check_apart
from tilewise.core.readback import unreadable, values_checked
from tilewise.core.real import is_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX = (torch.int32, torch.int64)
SUMS = "running sums of the lengths: torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)"
Variant = tuple[tw.Mask | None, tw.Score | None, float | None]  # mask, score, scale


def check(call: CacheCall) -> Variant:
    """Mask, score and scale of a call in which nothing is wrong; raises InputError and UnsupportedError."""
    packed = call.cu_seqlens_q is not None
    shape = "(num_blocks, page_size, heads, dim)" if call.block_table is not None else "(batch, seqlen, heads, dim)"
    check_tensors(shape, (4,), "heads come before their dimension", k_cache=call.k_cache, v_cache=call.v_cache)
    shape = "(total, heads, dim)" if packed else "(batch, seqlen, heads, dim)"
    check_tensors(shape, (3 if packed else 4,), "packed with cu_seqlens_q, else with a batch", q=call.q)
    given = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    for name, x in {"q": call.q, **given}.items():
        if x.dtype not in DTYPES:
            hint = "queries, keys and values of 8 bits are not offered"
            raise UnsupportedError(name, got=str(x.dtype), expected="float16, bfloat16, float32 or float64", hint=hint)
    if (call.k is None) != (call.v is None):
        name = "k" if call.k is None else "v"
        raise InputError(name, got="None", expected="a tensor, as the other", hint="keys and values come in pairs")
    if packed:
        _check_index("cu_seqlens_q", call.cu_seqlens_q, (None,), call.device)
    if call.k is not None:
        given |= {"k": call.k, "v": call.v}
        _check_new(call)
    for name, x in given.items():
        if x.dtype != call.q.dtype or x.device != call.device:
            expected = f"{call.q.dtype} on {call.device}, as q"
            raise InputError(name, got=f"{x.dtype} on {x.device}", expected=expected, hint="q, keys and values agree")
        if name.endswith("cache") and x.stride(-1) != 1 and x.shape[-1] > 1:
            hint = "a copy would not be written in place"
            raise InputError(name, got=f"strides {x.stride()}", expected="unit stride in the last dimension", hint=hint)
    _check_cache(call)
    if call.k is not None:
        check_apart("v_cache", call.v_cache, "k_cache", call.k_cache)
    check_steering("num_splits", call.num_splits)
    batch = (call.batch,)
    if isinstance(call.cache_seqlens, torch.Tensor):
        _check_index("cache_seqlens", call.cache_seqlens, batch, call.device)
    elif call.cache_seqlens is not None:
        check_steering("cache_seqlens", call.cache_seqlens, "or an int32 tensor (batch,)")
        if call.cache_seqlens > call.capacity:
            got, expected = shown(call.cache_seqlens), f"0 to {call.capacity}, the tokens that a request can have"
            raise InputError("cache_seqlens", got=got, expected=expected, hint="tokens in the cache before this call")
    for name in ("cache_leftpad", "rotary_seqlens"):
        if getattr(call, name) is not None:
            _check_index(name, getattr(call, name), batch, call.device)
    if call.cache_leftpad is not None and (not step_of(call.k_cache) or step_of(call.k_cache) != step_of(call.v_cache)):
        got = f"with strides {call.k_cache.stride()} and {call.v_cache.stride()}"
        expected = "rows of k_cache and v_cache the same whole number of tokens apart"
        raise UnsupportedError("cache_leftpad", got=got, expected=expected, hint="make both caches contiguous")
    _check_rotary(call)
    variant = _variant(call)
    if values_checked(call.device) and not unreadable(call.q):
        _check_values(call)
    return variant


def _check_new(call: CacheCall) -> None:
    """New keys and values fit the cache."""
    packed = call.cu_seqlens_k_new is not None
    lead = "total_new" if packed else "batch, seqlen_new"
    check_tensors(f"({lead}, heads, dim)", (3 if packed else 4,), "see cu_seqlens_k_new", k=call.k, v=call.v)
    if packed:
        _check_index("cu_seqlens_k_new", call.cu_seqlens_k_new, (call.batch + 1,), call.device)
    for name, x, cache in (("k", call.k, call.k_cache), ("v", call.v, call.v_cache)):
        rows = call.k.shape[:1] if packed else (call.batch, call.k.shape[1])
        if x.shape != (*rows, *cache.shape[2:]):
            expected = f"{(*rows, *cache.shape[2:])}, as q and {name}_cache have batch, heads and dim"
            raise InputError(name, got=f"shape {tuple(x.shape)}", expected=expected, hint="new tokens of each request")
    if call.cache_seqlens is None:
        hint = "it says where the new keys go"
        raise InputError("cache_seqlens", got="None", expected="an int or a tensor when k is given", hint=hint)


def _check_cache(call: CacheCall) -> None:
    """The cache fits q, and a request finds its rows."""
    q, k, v = call.q, call.k_cache, call.v_cache
    if v.shape[:3] != k.shape[:3] or not 1 <= v.shape[3] <= 512:
        expected = f"{(*k.shape[:3], 'dim_v')}, as k_cache, and dim_v 1 to 512"
        raise InputError("v_cache", got=tuple(v.shape), expected=expected, hint="a value for each key")
    if q.shape[-1] != k.shape[3] or not 1 <= q.shape[-1] <= 512:
        expected = f"{q.shape[-1]}, the head_dim of q, 1 to 512"
        raise InputError(
            "k_cache", got=f"head_dim {k.shape[3]}", expected=expected, hint="heads before their dimension"
        )
    if not k.shape[2] or not q.shape[-2] or q.shape[-2] % k.shape[2]:
        hint = "each head of the cache serves num_heads_q / num_heads_kv query heads"
        expected = f"a divisor of the {q.shape[-2]} query heads"
        raise InputError("k_cache", got=f"{k.shape[2]} heads", expected=expected, hint=hint)
    if not k.shape[1]:
        raise InputError("k_cache", got="pages of 0 tokens", expected="1 or more", hint="the second extent is tokens")
    if call.device.type != "cpu" and q.dtype == torch.float64:
        raise UnsupportedError("q", got="float64 on a GPU", expected="16 or 32 bits", hint="float64 runs on a CPU")
    if call.block_table is not None:
        _check_index(call.table_name, call.block_table, (call.batch, None), call.device)
        if call.cache_batch_idx is not None:
            hint = f"{call.table_name} already says where a request's tokens are"
            raise InputError("cache_batch_idx", got="a tensor", expected=f"None with {call.table_name}", hint=hint)
    elif call.cache_batch_idx is not None:
        _check_index("cache_batch_idx", call.cache_batch_idx, (call.batch,), call.device)
    elif k.shape[0] < call.batch:
        hint = "a row for each request, or cache_batch_idx"
        raise InputError("k_cache", got=f"{k.shape[0]} rows", expected=f"{call.batch} or more", hint=hint)


def _check_rotary(call: CacheCall) -> None:
    cos, sin = call.rotary_cos, call.rotary_sin
    for name, x, other in (("rotary_cos", cos, sin), ("rotary_sin", sin, cos)):
        if x is None and other is None:
            continue
        half = call.q.shape[-1] // 2
        expected = f"a float tensor (seqlen_ro, rotary_dim / 2), 1 to {half} wide, cos and sin alike"
        hint = "row p holds the angles of position p"
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim != 2 or not 1 <= x.shape[1] <= half:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise InputError(name, got=got, expected=expected, hint=hint)
        if isinstance(other, torch.Tensor) and other.shape != x.shape:
            raise InputError(name, got=tuple(x.shape), expected=f"{tuple(other.shape)}: {expected}", hint=hint)
        _check_device(name, x, call.device)
        if call.k is None:
            hint = "rotate q before the call"
            raise InputError(name, got="a tensor without k and v", expected="None, or new keys to rotate", hint=hint)


def _check_values(call: CacheCall) -> None:
    """What the numbers say: that lengths fit, pages exist, and no token is written twice."""
    table, pages = call.table_name, call.k_cache.shape[0]
    for name, sums, x in (
        ("cu_seqlens_q", call.cu_seqlens_q, call.q),
        ("cu_seqlens_k_new", call.cu_seqlens_k_new, call.k),
    ):
        if sums is not None and x is not None:
            values = sums.tolist()
            if values[0] != 0 or values[-1] != x.shape[0] or values != sorted(values):
                expected = f"values that never fall, from 0 to {x.shape[0]}, the number of rows"
                raise InputError(name, got=values, expected=expected, hint=SUMS)
    _inside("cache_seqlens", call.lengths, 0, call.capacity, "tokens in the cache before this call")
    room = "cache_seqlens" if call.block_table is None else table
    _inside(room, call.seqlens, 0, call.capacity, "room for the new tokens, too; these are lengths with them")
    if call.cache_leftpad is not None:
        _inside("cache_leftpad", call.cache_leftpad, 0, call.lengths, "no more than cache_seqlens")
    name = table if call.block_table is not None else "cache_batch_idx"
    used = torch.arange(call.table.shape[1], device=call.device) * call.page_size < call.seqlens[:, None]
    _inside(name, call.table[used], 0, pages - 1, "a page of the cache, or a row of a contiguous one")
    if call.k is not None:
        slots = call.slots.sort().values
        again = slots[1:][slots[1:] == slots[:-1]]
        if again.numel():
            twice = int(again[0])
            got = f"token {twice % call.page_size} of page {twice // call.page_size} for two new tokens"
            raise InputError(name, got=got, expected="a place for each", hint="pages that are written are not shared")
        if call.rotary_cos is not None:
            for places in call.places:
                hint = "positions of new keys and of queries; rows of rotary_cos and rotary_sin"
                _inside("rotary_cos", places, 0, call.rotary_cos.shape[0] - 1, hint)


def _inside(name: str, values: torch.Tensor, low: int, high: int | torch.Tensor, hint: str) -> None:
    wrong = (values < low) | (values > high)
    if bool(wrong.any()):
        limit = int(high[wrong][0]) if isinstance(high, torch.Tensor) else high
        raise InputError(name, got=int(values[wrong][0]), expected=f"{low} to {limit}", hint=hint)


def _check_index(name: str, x: Any, shape: tuple[int | None, ...], device: torch.device) -> None:
    expected = f"an int32 tensor {tuple('any' if n is None else n for n in shape)}"
    if not isinstance(x, torch.Tensor):
        raise InputError(name, got=type(x).__name__, expected=expected, hint="torch.tensor(..., dtype=torch.int32)")
    fits = x.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
    if not fits or x.dtype not in INDEX or (name.startswith("cu_") and not x.shape[0]):
        raise InputError(name, got=f"{x.dtype} {tuple(x.shape)}", expected=expected, hint="one row for each request")
    _check_device(name, x, device)
    if x.ndim == 1:  # pages of a table behind a request's last one may be anything
        check_index(name, x)


def _check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise InputError(name, got=f"device {x.device}", expected=f"{device}, the device of q", hint=".to(q.device)")


def check_steering(name: str, value: Any, also: str = "") -> None:
    """Raise InputError unless it is an integer >= 0."""
    if not isinstance(value, (numbers.Integral, torch.SymInt)) or isinstance(value, bool) or value < 0:
        expected = f"an integer >= 0 {also}".rstrip()
        raise InputError(name, got=shown(value), expected=expected, hint="0 leaves it open, or is an empty cache")


def _variant(call: CacheCall) -> Variant:
    """Mask, score and scale; factors of q and k multiply what softcap sees."""
    scale, heads = call.softmax_scale, call.q.shape[-2]
    symbolic = isinstance(scale, (torch.SymInt, torch.SymFloat))
    if scale is not None and not symbolic and not is_finite(scale):
        hint = "None is head_dim ** -0.5"
        raise InputError("softmax_scale", got=shown(scale), expected="a finite number", hint=hint)
    mask = window_mask(call.causal, call.window_size)
    score = distance_score(call.softcap, call.alibi_slopes, call.batch, heads)
    if call.alibi_slopes is not None:
        _check_device("alibi_slopes", call.alibi_slopes, call.device)
    for name, x in zip(("q_descale", "k_descale", "v_descale"), call.descales, strict=True):
        shape = (call.batch, call.k_cache.shape[2])
        if x is not None and not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape == shape):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            hint = "factors that were divided out when q, k or v were made"
            raise InputError(name, got=got, expected=f"a float tensor (batch, heads of k) = {shape}", hint=hint)
        if x is not None:
            _check_device(name, x, call.device)
    found = [x for x in call.descales[:2] if x is not None]
    if found:
        factor, group = math.prod(found[1:], start=found[0]), call.group
        scaled = tw.score(lambda s, b, h, i, j: s * factor[b, h // group], "descale")
        score = scaled if score is None else scaled >> score
    return mask, score, scale if scale is None else float(scale)
