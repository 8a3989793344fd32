"""SageAttention's functions (package sageattention, 2.2), run by tilewise: same names, arguments and layouts.

Arguments become a scheme (`tilewise.Sage`), and attention runs with `quantize=` that scheme. `tensor_layout` is "HND",
(batch, heads, seqlen, dim), or "NHD", (batch, seqlen, heads, dim). `is_causal` is aligned to the top left for all
lengths: query i sees keys 0 to i. SageAttention documents it for equal lengths only, and its kernels do the same.
(`tilewise.attention` aligns to the bottom right.) lse is SageAttention's: natural logarithm, of the scores before keys
are smoothed; -inf for a row that sees no key.

Beyond SageAttention: any head_dim up to 256 and a head_dim_v, float32, the CPU, `attn_mask` in `sageattn`, `smooth_v`
with every `pv_accum_dtype`, keys of packed sequences smoothed per sequence, gradients (straight-through estimator).
A keyword that a function does not have raises TypeError; SageAttention ignores it.

The groups that share a scale are those of Hopper on every GPU: blocks of 64 queries and 128 keys, warps of 16 queries.
Sums that SageAttention accumulates in float16 (`pv_accum_dtype`) are accumulated in float32; for "fp32+fp16" values are
scaled as in SageAttention. Float32 sums are flushed after each block of keys.

Source: Zhang et al., "SageAttention", 2024; "SageAttention2", 2024; "SageAttention2++", 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import check_cu_seqlens, check_tensors, index, unit_stride
from tilewise.adapters.sdpa import formula_of, top_left_causal
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.flags import check_flags
from tilewise.layouts import Packed

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    smooth_k: bool = True,
    attn_mask: torch.Tensor | None = None,
) -> Result:
    """SageAttention's `sageattn`: INT8 scores, scales by thread, values in the fastest format of the GPU.

    Values are FP8, summed in float16 on sm_89 and sm_120 (SageAttention2++), in float32 elsewhere; before sm_89 they
    stay in 16 bits.

    Args:
        q: (batch, num_heads_q, seqlen_q, head_dim), or as `tensor_layout` has it.
        k, v: (batch, num_heads_kv, seqlen_k, head_dim and head_dim_v); num_heads_kv divides num_heads_q.
        tensor_layout: "HND" or "NHD".
        is_causal: query i sees keys 0 to i.
        sm_scale: factor of q k^T; default head_dim ** -0.5.
        return_lse: return (out, lse).
        smooth_k: centre keys by their mean.
        attn_mask: bool, True for visible pairs, or float, added to the scaled scores; broadcastable to (batch,
            num_heads_q, seqlen_q, seqlen_k). SageAttention accepts and ignores it.

    Returns:
        out like q with head_dim_v, in the same layout; lse float32 (batch, num_heads_q, seqlen_q).

    Raises:
        InputError: an argument is wrong.
        TypeError: an unknown keyword.

    Example:
        >>> from tilewise.adapters.sageattention import sageattn
        >>> out = sageattn(q, k, v, tensor_layout="NHD", is_causal=True)
    """
    return attend(q, k, v, fastest(q, smooth_k), tensor_layout, is_causal, sm_scale, return_lse, attn_mask)


def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
) -> Result:
    """SageAttention's function of this name: INT8 scores, scales by block, values in float16 (SageAttention 1).

    Args:
        q, k, v, tensor_layout, is_causal, attn_mask, sm_scale, smooth_k, return_lse: as in `sageattn`.
        quantization_backend: "triton" or "cuda", without effect.

    Returns: as `sageattn`.

    Raises:
        InputError, TypeError: as `sageattn`.

    Example:
        >>> from tilewise.adapters.sageattention import sageattn_qk_int8_pv_fp16_triton
        >>> out = sageattn_qk_int8_pv_fp16_triton(q, k, v, tensor_layout="NHD")
    """
    _one_of("quantization_backend", quantization_backend, ("triton", "cuda"), "codes are the same by either")
    scheme = by_block(smooth_k)
    return attend(q, k, v, scheme, tensor_layout, is_causal, sm_scale, return_lse, attn_mask)


def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
) -> Result:
    """SageAttention's function of this name: INT8 scores, values in float16.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse: as in `sageattn`.
        qk_quant_gran: "per_thread", or "per_warp": 16 queries share a scale, and 128 keys.
        pv_accum_dtype: "fp32", "fp16+fp32" or "fp16", without effect: sums are float32.
        smooth_v: centre values by their mean.

    Returns: as `sageattn`.

    Raises:
        InputError, TypeError: as `sageattn`.

    Example:
        >>> from tilewise.adapters.sageattention import sageattn_qk_int8_pv_fp16_cuda
        >>> out = sageattn_qk_int8_pv_fp16_cuda(q, k, v, tensor_layout="NHD", smooth_v=True)
    """
    _one_of("pv_accum_dtype", pv_accum_dtype, ("fp32", "fp16+fp32", "fp16"), "sums are float32 for each")
    scheme = _scheme(qk_quant_gran, smooth_k, smooth_v, pv="fp16")
    return attend(q, k, v, scheme, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_qk_int8_pv_fp8_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
) -> Result:
    """SageAttention's function of this name: INT8 scores, values and weights in FP8.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse: as in `sageattn`.
        qk_quant_gran, smooth_v: as in `sageattn_qk_int8_pv_fp16_cuda`.
        pv_accum_dtype: "fp32+fp16" sums in float16 (SageAttention2++); "fp32+fp32" and "fp32" both sum in float32,
            flushed after each block of keys.

    Returns: as `sageattn`.

    Raises:
        InputError, TypeError: as `sageattn`.

    Example:
        >>> from tilewise.adapters.sageattention import sageattn_qk_int8_pv_fp8_cuda
        >>> out = sageattn_qk_int8_pv_fp8_cuda(q, k, v, tensor_layout="NHD", qk_quant_gran="per_warp")
    """
    _one_of("pv_accum_dtype", pv_accum_dtype, ("fp32+fp16", "fp32+fp32", "fp32"), "how weights times values are summed")
    scheme = _scheme(qk_quant_gran, smooth_k, smooth_v, pv_sum="fp16" if pv_accum_dtype == "fp32+fp16" else "fp32")
    return attend(q, k, v, scheme, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
) -> Result:
    """SageAttention's function of this name: INT8 scores, values and weights in FP8, sums flushed after each block.

    Args:
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse: as in `sageattn`.
        qk_quant_gran: as in `sageattn_qk_int8_pv_fp16_cuda`.
        pv_accum_dtype: "fp32+fp32".

    Returns: as `sageattn`.

    Raises:
        InputError, TypeError: as `sageattn`.
        UnsupportedError: pv_accum_dtype="fp32", for which SageAttention raises NotImplementedError, too.

    Example:
        >>> from tilewise.adapters.sageattention import sageattn_qk_int8_pv_fp8_cuda_sm90
        >>> out = sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, tensor_layout="NHD")
    """
    _one_of("pv_accum_dtype", pv_accum_dtype, ("fp32+fp32", "fp32"), "Hopper has no faster sums in float16")
    if pv_accum_dtype == "fp32":
        hint = "one accumulator of 13 bits loses more the more keys there are"
        raise UnsupportedError("pv_accum_dtype", got="'fp32'", expected="'fp32+fp32'", hint=hint)
    scheme = _scheme(qk_quant_gran, smooth_k, False)
    return attend(q, k, v, scheme, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
) -> torch.Tensor:
    """SageAttention's `sageattn_varlen`: as `sageattn_qk_int8_pv_fp16_triton`, for concatenated sequences.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k, v: (total_k, num_heads_kv, head_dim and head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,), cumulative lengths from 0 to the totals.
        max_seqlen_q, max_seqlen_k: accepted, and not used.
        is_causal: query i of a sequence sees its keys 0 to i.
        sm_scale: factor of q k^T; default head_dim ** -0.5.
        smooth_k: centre keys by the mean of their sequence (SageAttention: by one mean of all sequences).

    Returns:
        out (total_q, num_heads_q, head_dim_v).

    Raises:
        InputError: an argument is wrong.
        TypeError: an unknown keyword.

    Example:
        >>> from tilewise.adapters.sageattention import sageattn_varlen
        >>> cu_seqlens = torch.tensor([0, 30, 100])
        >>> out = sageattn_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, 70, 70, is_causal=True)
    """
    check_flags(is_causal=is_causal, smooth_k=smooth_k)
    hint = "sageattn takes four dimensions"
    check_tensors("(total, heads, dim)", (3,), hint, q=q, k=k, v=v)
    check_cu_seqlens(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        got, expected = f"{cu_seqlens_k.shape[0]} entries", f"{cu_seqlens_q.shape[0]}, as cu_seqlens_q has"
        raise InputError("cu_seqlens_k", got=got, expected=expected, hint="both are of the same sequences")
    cu = [index("cu_seqlens_q", cu_seqlens_q), index("cu_seqlens_k", cu_seqlens_k)]
    mask = None
    if is_causal:
        shift = cu[1].diff() - cu[0].diff()
        mask = tw.causal if cu_seqlens_q is cu_seqlens_k else tw.mask(lambda b, h, i, j: j <= i - shift[b], "top_left")
    q, k, v = (unit_stride(x) for x in (q, k, v))
    scheme = by_block(smooth_k)
    return tw.attention(q, k, v, mask=mask, layout=Packed(*cu), scale=sm_scale, quantize=scheme)


def _one_of(name: str, value: Any, allowed: tuple[str, ...], hint: str) -> None:
    """Raise InputError unless `value` is allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise InputError(name, got=shown(value), expected=f"one of {', '.join(map(repr, allowed))}", hint=hint)


def _scheme(qk_quant_gran: Any, smooth_k: bool, smooth_v: bool, **values: str) -> tw.Sage:
    """The scheme of INT8 scores whose scales are shared so."""
    check_flags(smooth_k=smooth_k, smooth_v=smooth_v)
    _one_of("qk_quant_gran", qk_quant_gran, ("per_thread", "per_warp"), "who shares a scale of queries and keys")
    smooth = tuple(side for side, wanted in (("k", smooth_k), ("v", smooth_v)) if wanted)
    if qk_quant_gran == "per_warp":
        return tw.Sage(q_scale="warp", k_scale="block", smooth=smooth, **values)  # type: ignore[arg-type]
    return tw.Sage(smooth=smooth, **values)  # type: ignore[arg-type]


def by_block(smooth_k: bool) -> tw.Sage:
    """The scheme of SageAttention 1."""
    check_flags(smooth_k=smooth_k)
    return tw.Sage(pv="fp16", q_scale="block", k_scale="block", smooth=("k",) if smooth_k else ())


def fastest(q: torch.Tensor, smooth_k: bool) -> tw.Sage:
    """The scheme of SageAttention 2 that the GPU of `q` is fast at."""
    architecture = torch.cuda.get_device_capability(q.device) if getattr(q, "is_cuda", False) else None
    return _scheme("per_thread", smooth_k, False, **_values_of(architecture))


def _values_of(architecture: tuple[int, int] | None) -> dict[str, str]:
    """What becomes of values on a GPU of this compute capability; None: no GPU."""
    if architecture is not None and architecture < (8, 9):
        return {"pv": "fp16"}
    faster = architecture is not None and (architecture == (8, 9) or architecture[0] == 12)
    return {"pv_sum": "fp16"} if faster else {}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scheme: tw.Sage,
    tensor_layout: Any,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    attn_mask: torch.Tensor | None = None,
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = tw.attention_with_lse,
) -> Result:
    """What all of them do: `attention` of tensors (batch, seqlen, heads, dim), whose result goes back."""
    check_flags(is_causal=is_causal, return_lse=return_lse)
    _one_of("tensor_layout", tensor_layout, ("HND", "NHD"), "H heads, N tokens, D dimensions, behind the batch")
    heads_first = tensor_layout == "HND"
    shape = "(batch, heads, seqlen, dim)" if heads_first else "(batch, seqlen, heads, dim)"
    check_tensors(shape, (4,), "sageattn_varlen takes three dimensions", q=q, k=k, v=v)
    q, k, v = (unit_stride(x).transpose(1, 2) if heads_first else unit_stride(x) for x in (q, k, v))
    if attn_mask is not None and is_causal:
        hint = "a mask that is causal needs no is_causal"
        raise InputError("attn_mask", got="a mask with is_causal=True", expected="one of them", hint=hint)
    shift = k.shape[1] - q.shape[1]
    mask: tw.Mask | None = None
    score: tw.Score | None = None
    if is_causal:
        mask = top_left_causal(shift)
    elif attn_mask is not None:
        mask, score = formula_of(attn_mask, (q.shape[0], q.shape[2]), q.shape[1], k.shape[1])
    o, lse = attention(q, k, v, mask=mask, score=score, scale=sm_scale, quantize=scheme)
    o = o.transpose(1, 2) if heads_first else o
    return (o, lse) if return_lse else o
