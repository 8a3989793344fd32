"""FlexAttention's calls (torch.nn.attention.flex_attention), run by tilewise: same signatures, no dense mask.

Differences from PyTorch's: no `torch.compile` is needed, and no seqlen_q x seqlen_k tensor is built in eager mode;
`create_block_mask` classifies tiles by interval arithmetic, when they are first read; `score_mod` and `mask_mod` are
traced, so they may use the operators that `tilewise.mask` accepts; `kernel_options`, which tune PyTorch's kernels, are
ignored. Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (2024).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import tilewise as tw
from tilewise.adapters.axes import autocast, check_tensors, raw_score, seqlen_first
from tilewise.adapters.block_mask import BlockMask, MaskMod, mask_of
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.flags import check_flags

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


def create_block_mask(
    mask_mod: MaskMod | tw.Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """FlexAttention's `create_block_mask` without its Q_LEN x KV_LEN tensor: traces `mask_mod` and keeps the formula.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) -> bool over the query's own index, or a `tilewise.Mask`.
        B, H: batch size and query heads that the mask depends on; None for a mask shared by all.
        Q_LEN, KV_LEN: sequence lengths.
        device: where attention will run; by default the accelerator, or the CPU if there is none.
        BLOCK_SIZE: tile extents of the lists for PyTorch's kernels; tilewise's kernels have their own.
        _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order: accepted, and not used.

    Returns:
        A `BlockMask`.

    Raises:
        InputError: a size is wrong.
        FormulaError: `mask_mod` cannot be traced (a data-dependent branch, an operation outside the formula language).

    Example:
        >>> from tilewise.adapters.flex import create_block_mask
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, device="cpu")
    """
    check_flags(
        _compile=_compile, separate_full_blocks=separate_full_blocks, compute_dq_write_order=compute_dq_write_order,
        dq_kv_order=dq_kv_order,
    )  # fmt: skip
    shared = "None for a mask shared by all"
    batch, heads = (1 if n is None else _integer(name, n, 0, shared) for name, n in (("B", B), ("H", H)))
    lengths = [_integer(name, n, 0, "of the attention to come") for name, n in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN))]
    blocks = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    hint = "(queries, keys) of a tile, 128 by default"
    if len(blocks) != 2:
        expected = "an integer >= 1, or two of them"
        raise InputError("create_block_mask BLOCK_SIZE", got=shown(BLOCK_SIZE), expected=expected, hint=hint)
    block_m, block_n = (_integer("BLOCK_SIZE", n, 1, hint) for n in blocks)
    device = device if device is not None else torch.accelerator.current_accelerator() or "cpu"
    shape = (batch, heads, lengths[0], lengths[1])
    return BlockMask(mask_mod, shape=shape, block_size=(block_m, block_n), device=device)


def _integer(name: str, value: Any, least: int, hint: str) -> Any:
    """An argument of `create_block_mask` as an int; symbolic ones of torch.compile stay so."""
    whole = isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)
    if not whole or value < least:
        raise InputError(f"create_block_mask {name}", got=shown(value), expected=f"an integer >= {least}", hint=hint)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, int) else value


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | tw.Score | None = None,
    block_mask: TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` through `tilewise.attention`.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim).
        key, value: (batch or 1, num_heads_kv, seqlen_k, head_dim and head_dim_v).
        score_mod: function (score, b, h, q_idx, kv_idx) -> float over the query's own index, or a `tilewise.Score`;
            tensors that it captures take gradients.
        block_mask: from `create_block_mask`, this one or PyTorch's.
        scale: factor of query key^T; default head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads.
        return_lse, return_aux: also return the log-sum-exp (natural logarithm, float32, float64 for float64
            input, (batch, num_heads_q, seqlen_q), -inf for a row that sees no key), bare or in an AuxOutput.
        kernel_options: accepted and not used.

    Returns:
        (batch, num_heads_q, seqlen_q, head_dim_v), alone or with what was asked for.

    Raises:
        InputError: an argument is wrong, as for FlexAttention.
        UnsupportedError: `AuxRequest(max_scores=True)`.

    Example:
        >>> from tilewise.adapters.flex import create_block_mask, flex_attention
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, device="cpu")
        >>> out = flex_attention(*torch.randn(3, 2, 4, 100, 16), block_mask=mask)
    """
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    hint = "x[None] adds a batch dimension"
    check_tensors("(batch, heads, seqlen, dim)", (4,), hint, query=query, key=key, value=value)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InputError(
            "key", got=f"{key.shape[1]} heads", expected=f"{query.shape[1]} as query", hint="pass enable_gqa=True"
        )
    if return_aux is not None:
        if return_lse:
            hint = "return_aux=AuxRequest(lse=True) alone"
            raise InputError("return_lse", got="True with return_aux", expected="one of them", hint=hint)
        if not isinstance(return_aux, AuxRequest):
            hint = "None returns the output alone"
            raise InputError("return_aux", got=shown(return_aux), expected="AuxRequest(lse=True) or None", hint=hint)
        check_flags(lse=return_aux.lse, max_scores=return_aux.max_scores)
        if return_aux.max_scores:
            raise UnsupportedError(
                "return_aux", got="max_scores=True", expected="AuxRequest(lse=True)", hint="lse bounds the scores"
            )
    if key.shape[0] == 1 and query.shape[0] > 1 and block_mask is not None:
        key, value = key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    mask = None if block_mask is None else mask_of(_fitting(block_mask, seqlen_q, seqlen_k), seqlen_q, seqlen_k)
    if score_mod is not None and not isinstance(score_mod, tw.Score):
        score_mod = raw_score(score_mod, seqlen_k - seqlen_q)
    q, k, v = (seqlen_first(x) for x in autocast(query, key, value))
    o, lse = tw.attention_with_lse(q, k, v, mask=mask, score=score_mod, scale=scale)
    o = o.transpose(1, 2)
    if return_aux is not None:
        return o, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (o, lse) if return_lse else o


def _fitting(block_mask: TorchBlockMask, seqlen_q: int, seqlen_k: int) -> TorchBlockMask:
    """Raise unless this is a BlockMask for these lengths (one with a single huge tile fits any)."""
    if not isinstance(block_mask, TorchBlockMask):
        hint = "create_block_mask makes one of a function or of a tilewise.Mask"
        raise InputError("block_mask", got=type(block_mask).__name__, expected="a BlockMask or None", hint=hint)
    if block_mask.BLOCK_SIZE[0] < 1 << 30 and tuple(block_mask.shape[-2:]) != (seqlen_q, seqlen_k):
        raise InputError(
            "block_mask",
            got=f"shape {tuple(block_mask.shape)}",
            expected=f"seqlen_q {seqlen_q}, seqlen_k {seqlen_k}",
            hint="create a BlockMask for these lengths",
        )
    return block_mask
