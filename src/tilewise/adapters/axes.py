"""What the adapters share: PyTorch's order of dimensions, and formulas over a query's own index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.formula.expr import Expr


def check_tensors(expected: str, ranks: Sequence[int], hint: str, **tensors: Any) -> None:
    """Raise InputError unless each is a dense tensor of one of `ranks`."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise InputError(name, got=type(x).__name__, expected=f"a tensor {expected}", hint="use torch.as_tensor")
        if x.is_nested or x.layout != torch.strided:
            got = f"a {'nested' if x.is_nested else x.layout} tensor"
            jagged = "tilewise.attention(layout=tilewise.Packed(cu_seqlens)) runs sequences of different lengths"
            raise InputError(name, got=got, expected=f"a dense tensor {expected}", hint=jagged)
        if x.ndim not in ranks:
            raise InputError(name, got=f"shape {tuple(x.shape)}", expected=f"a tensor {expected}", hint=hint)


def seqlen_first(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seqlen, dim) as (batch, seqlen, heads, dim), with unit stride in dim."""
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    return x.transpose(1, 2)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's dtype where autocast is on: PyTorch's attention does the same."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def raw_index(i: Expr, shift: int) -> Expr:
    """The query's own index, from its place on the key axis; `shift` is seqlen_k - seqlen_q."""
    return i - shift if not isinstance(shift, int) or shift else i


def raw_mask(mask_mod: Callable[..., Any], shift: int) -> tw.Mask:
    """The mask of a function (b, h, q_idx, kv_idx) -> bool over the query's own index."""
    return tw.mask(lambda b, h, i, j: mask_mod(b, h, raw_index(i, shift), j), getattr(mask_mod, "__name__", None))


def raw_score(score_mod: Callable[..., Any], shift: int) -> tw.Score:
    """The score of a function (score, b, h, q_idx, kv_idx) -> float over the query's own index."""
    return tw.score(
        lambda s, b, h, i, j: score_mod(s, b, h, raw_index(i, shift), j), getattr(score_mod, "__name__", None)
    )


def broadcast_load(table: torch.Tensor, b: Expr, h: Expr, q: Expr, k: Expr) -> Any:
    """`table[b, h, q, k]` of a tensor of rank 4 whose dimensions of extent 1 are shared."""
    index = (x if extent != 1 else 0 for x, extent in zip((b, h, q, k), table.shape, strict=True))
    return table[tuple(index)]
