"""FlashInfer's functions for one request, and those that fill a paged cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import check_index
from tilewise.adapters.flashinfer.plan import (
    Cache,
    State,
    check,
    custom_mask_of,
    dtype_of,
    finish,
    integer,
    layout_name,
    number,
    pool_of,
    refuse,
    variant_of,
)
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.core.flags import check_flags
from tilewise.core.readback import unreadable, values_checked


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one token of one request.

    Args:
        q: (num_qo_heads, head_dim).
        k, v: (tokens, num_kv_heads, head_dim); in layout HND (num_kv_heads, tokens, head_dim).
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE" or "ALIBI".
        use_tensor_cores, rope_scale, rope_theta: accepted, and not used.
        q_scale, k_scale, v_scale: numbers; the first two multiply the scores, the last the output.
        window_left: W leaves W + 1 keys visible; -1 is no limit.
        logits_soft_cap: scores become cap * tanh(score / cap); None and 0 are none.
        sm_scale: factor of q k^T; None is head_dim ** -0.5.
        return_lse: return (out, lse).

    Returns:
        out (num_qo_heads, head_dim); lse float32 (num_qo_heads,), base 2.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: pos_encoding_mode="ROPE_LLAMA", or ALiBi with a soft cap.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> out = flashinfer.single_decode_with_kv_cache(q[0, -1], k[0], v[0])
    """
    check_flags(use_tensor_cores=use_tensor_cores, return_lse=return_lse)
    if not isinstance(q, torch.Tensor) or q.ndim != 2:
        got = f"shape {tuple(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
        raise InputError("q", got=got, expected="a tensor (heads, dim)", hint="one token of one request")
    options = {
        "pos_encoding_mode": pos_encoding_mode,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap,
        "sm_scale": sm_scale,
    }
    state = _single(q[None], k, v, kv_layout, (q_scale, k_scale), None, options)
    found = finish(state, v_scale, None, None, return_lse)
    return (found[0][0], found[1][0]) if return_lse else found[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: None = None,
    scale_k: None = None,
    scale_v: None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Attention of the tokens of one request.

    Args:
        q: (seqlen_q, num_qo_heads, head_dim).
        k, v: (seqlen_k, num_kv_heads, head_dim); in layout HND (num_kv_heads, seqlen_k, head_dim).
        scale_q, scale_k, scale_v: None; they belong to 8-bit inputs.
        o_dtype: that of q, or None.
        custom_mask: bool (seqlen_q, seqlen_k), True for visible pairs; replaces `causal`.
        packed_custom_mask: the same as uint8 bits, lowest bit first.
        causal: the last query has the position of the last key.
        kv_layout, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, return_lse: as in
            `single_decode_with_kv_cache`.
        use_fp16_qk_reduction, rope_scale, rope_theta, backend: accepted, and not used.

    Returns:
        out (seqlen_q, num_qo_heads, head_dim); with `return_lse` also lse float32 (seqlen_q, num_qo_heads), base 2.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: scales, another `o_dtype`, or what `single_decode_with_kv_cache` does not support.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> out, lse = flashinfer.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=True, return_lse=True)
    """
    check_flags(causal=causal, use_fp16_qk_reduction=use_fp16_qk_reduction, return_lse=return_lse)
    refuse("tensors of scales go with 8-bit inputs", scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
    if not isinstance(q, torch.Tensor) or q.ndim != 3:
        got = f"shape {tuple(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
        raise InputError("q", got=got, expected="a tensor (tokens, heads, dim)", hint="of one request")
    if o_dtype is not None and dtype_of("o_dtype", o_dtype) != q.dtype:
        raise UnsupportedError("o_dtype", got=str(o_dtype), expected=f"{q.dtype}, as q", hint="convert the output")
    options = {
        "causal": causal,
        "pos_encoding_mode": pos_encoding_mode,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap,
        "sm_scale": sm_scale,
    }
    state = _single(q, k, v, kv_layout, (), (custom_mask, packed_custom_mask), options)
    return finish(state, None, None, None, return_lse)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


def _single(
    q: torch.Tensor, k: Any, v: Any, kv_layout: str, scales: tuple[Any, ...], masks: Any, options: dict[str, Any]
) -> State:
    """(o, lse) as tilewise has them for one request, packed."""
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.ndim != 3:
            got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise InputError(name, got=got, expected="a tensor of rank 3", hint="(tokens, heads, dim) is NHD")
    if layout_name(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    custom = None
    if masks is not None and any(x is not None for x in masks):
        known = tuple(torch.tensor([x.shape[0]]) for x in (q, k))
        queries, keys = (x.to(q.device) for x in known)
        if masks[0] is not None:
            shape = (q.shape[0], k.shape[0])
            check("custom_mask", masks[0], shape, torch.bool, f"bool {shape}")
        flat = None if masks[0] is None else masks[0].flatten()
        custom = custom_mask_of(flat, masks[1], (queries, keys), q.device, (known[0], known[1]))
    variant = variant_of(
        q.shape[2], q.shape[1], q.device, queries=q.shape[0], keys=k.shape[0], custom=custom, **options
    )
    scale = variant.scale
    for name, factor in zip(("q_scale", "k_scale"), scales, strict=False):
        scale *= 1.0 if factor is None else number(name, factor)
    o, lse = tw.attention_with_lse(q[None], k[None], v[None], mask=variant.mask, score=variant.score, scale=scale)
    return o[0], lse[0]


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of keys of each request: a last page of length 0 is empty.

    Args:
        kv_indptr: int32 or int64 (batch + 1,), cumulative numbers of pages.
        kv_last_page_len: int32 or int64 (batch,), tokens in each request's last page.
        page_size: tokens of a page.

    Returns:
        (batch,), in the dtype of the arguments.

    Raises:
        InputError: an argument is wrong.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> flashinfer.get_seq_lens(torch.tensor([0, 3, 4]), torch.tensor([13, 8]), 16)
        tensor([45,  8])
    """
    batch = _batch_of("kv_indptr", kv_indptr)
    _check_index("kv_last_page_len", kv_last_page_len, batch)
    integer("page_size", page_size, 1, "tokens in a page")
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the position of each new token; the new tokens of a request are its last ones.

    Args:
        append_indptr: int32 or int64 (batch + 1,), cumulative numbers of new tokens.
        seq_lens: int32 or int64 (batch,), tokens of each request, new ones included.
        nnz: number of new tokens, append_indptr[-1] or more.

    Returns:
        (batch_indices, positions), int32 (nnz,). Rows from append_indptr[-1] on have request -1 and position 0.

    Raises:
        InputError: an argument is wrong.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> flashinfer.get_batch_indices_positions(torch.tensor([0, 2, 3]), torch.tensor([10, 5]), 3)
        (tensor([0, 0, 1], dtype=torch.int32), tensor([8, 9, 4], dtype=torch.int32))
    """
    batch = _batch_of("append_indptr", append_indptr)
    _check_index("seq_lens", seq_lens, batch)
    check_index("append_indptr", append_indptr)
    check_index("seq_lens", seq_lens)
    integer("nnz", nnz, 0, "how many new tokens there are: append_indptr[-1], or more")
    rows = torch.arange(nnz, device=append_indptr.device, dtype=append_indptr.dtype)
    if not batch:
        return torch.full_like(rows, -1, dtype=torch.int32), torch.zeros_like(rows, dtype=torch.int32)
    found = torch.searchsorted(append_indptr[1:].contiguous(), rows, right=True)
    known = found < batch
    request = found.clamp(max=batch - 1)
    positions = seq_lens.to(rows.device)[request] - append_indptr[1:][request] + rows
    return torch.where(known, found, -1).to(torch.int32), torch.where(known, positions, 0).to(torch.int32)


def _check_index(name: str, x: Any, entries: int | None) -> None:
    """Raise InputError unless x is a tensor of integers, (entries,); None is any number of them."""
    if not isinstance(x, torch.Tensor) or x.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise InputError(
            name, got=got, expected="an int32 tensor of rank 1", hint="torch.tensor(..., dtype=torch.int32)"
        )
    if entries is not None and x.shape[0] != entries:
        hint = "index tensors are of the same requests, or of the same tokens"
        raise InputError(name, got=f"{x.shape[0]} entries", expected=f"{entries}, as the others have", hint=hint)


def _batch_of(name: str, indptr: Any) -> int:
    """How many requests running sums are of."""
    _check_index(name, indptr, None)
    if not indptr.shape[0]:
        raise InputError(name, got="no entries", expected="running sums from 0", hint="one more than requests")
    return int(indptr.shape[0]) - 1


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values into the pages of their requests, in place, without waiting for the GPU.

    Args:
        append_key, append_value: (tokens, num_kv_heads, head_dim), of the cache's dtype.
        batch_indices, positions: int32 or int64 (tokens,), as `get_batch_indices_positions` gives them; a token of
            request -1 is skipped.
        paged_kv_cache: (pages, 2, page_size, num_kv_heads, head_dim), or a tuple of k and v without the 2; in layout
            HND heads come before page_size.
        kv_indices, kv_indptr: request r has pages kv_indices[kv_indptr[r]:kv_indptr[r + 1]], which already have room
            for the new tokens.
        kv_last_page_len: (batch,), checked for its shape, and not used.
        kv_layout: "NHD" or "HND".

    Raises:
        InputError: an argument is wrong; values are checked on a CPU.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> cache, pages, ends = torch.zeros(4, 2, 16, 2, 16), torch.tensor([3]), torch.tensor([0, 1])
        >>> new = torch.tensor([0, 0]), torch.tensor([0, 1])  # request 0, positions 0 and 1
        >>> flashinfer.append_paged_kv_cache(k[0, :2], v[0, :2], *new, cache, pages, ends, torch.tensor([2]))
    """
    pools = pool_of(paged_kv_cache, layout_name(kv_layout))
    _check_index("batch_indices", batch_indices, None)
    tokens, page_size = batch_indices.shape[0], pools[0].shape[1]
    _check_index("positions", positions, tokens)
    _check_index("kv_indices", kv_indices, None)
    requests = _batch_of("kv_indptr", kv_indptr)
    _check_index("kv_last_page_len", kv_last_page_len, requests)
    for name, x, pool in zip(("append_key", "append_value"), (append_key, append_value), pools, strict=True):
        expected = f"{pool.dtype} ({tokens}, {pool.shape[2]}, {pool.shape[3]}): as the cache, a row for each index"
        check(name, x, (tokens, *pool.shape[2:]), pool.dtype, expected)
    if not tokens or not kv_indices.shape[0]:
        return
    valid = batch_indices >= 0
    if values_checked(batch_indices.device) and not unreadable(batch_indices) and int(batch_indices.max()) >= requests:
        got, hint = f"request {int(batch_indices.max())}", "get_batch_indices_positions makes them"
        raise InputError("batch_indices", got=got, expected=f"below {requests}, as kv_indptr says", hint=hint)
    batch, position = batch_indices.clamp(min=0).long(), positions.clamp(min=0).long()
    entry = kv_indptr[batch] + position // page_size
    behind = (entry >= kv_indptr[batch + 1]) | (entry >= kv_indices.shape[0])
    if batch.device.type == "cpu" and bool(behind[valid].any()):
        hint = "the page table must have room for the new tokens"
        raise InputError("positions", got="one behind its request's pages", expected="pages for all", hint=hint)
    page = kv_indices[entry.clamp(max=kv_indices.shape[0] - 1)].long()
    slots = torch.where(valid, page * page_size + position % page_size, -1)
    with torch.no_grad():
        tw.kv_write(append_key, append_value, *pools, slots)
