"""What the adapters share: PyTorch's order of dimensions, formulas over a query's own index, windows and distances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import tilewise as tw
from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.core.readback import host_range, values_checked
from tilewise.core.real import is_finite
from tilewise.core.tensors import as_int32, check_dense
from tilewise.formula.expr import Expr


def check_tensors(expected: str, ranks: Sequence[int], hint: str, **tensors: Any) -> None:
    """Raise InputError unless each is a dense tensor of one of `ranks`."""
    for name, x in tensors.items():
        check_dense(name, x, f"a dense tensor {expected}")
        if x.ndim not in ranks:
            raise InputError(name, got=f"shape {tuple(x.shape)}", expected=f"a tensor {expected}", hint=hint)


def check_cu_seqlens(**cu_seqlens: Any) -> None:
    """Raise InputError unless each is a tensor of rank 1; `attention` looks at the rest."""
    hint = "running sums of the lengths: torch.tensor([0, *lengths]).cumsum(0)"
    check_tensors("(batch + 1,)", (1,), hint, **cu_seqlens)


def unpacked(name: str, packed: torch.Tensor, parts: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The tensors that lie side by side in one, (batch, seqlen, parts, heads, dim) or (total, parts, heads, dim)."""
    if not isinstance(packed, torch.Tensor) or packed.ndim != rank or packed.shape[-3] != parts:
        got = f"shape {tuple(packed.shape)}" if isinstance(packed, torch.Tensor) else type(packed).__name__
        lead = "(batch, seqlen" if rank == 5 else "(total"
        hint = f"torch.stack of the {parts} tensors along dimension {rank - 3}"
        raise InputError(name, got=got, expected=f"{lead}, {parts}, heads, head_dim)", hint=hint)
    return packed.unbind(-3)


def check_broadcast(name: str, table: torch.Tensor, full: Sequence[int]) -> None:
    """Raise InputError unless each extent is that of (batch, heads, seqlen_q, seqlen_k), or 1."""
    # not `in (1, size)`: under torch.compile a symbolic size is never found in a tuple
    if any(n != 1 and n != size for n, size in zip(table.shape, full, strict=True)):
        hint = "(batch, heads, seqlen_q, seqlen_k), where a dimension of 1 is shared"
        raise InputError(name, got=f"shape {tuple(table.shape)}", expected=f"broadcastable to {tuple(full)}", hint=hint)


def check_index(name: str, x: Any) -> None:
    """Raise InputError unless x is an int32 or int64 tensor whose values, where they are checked, fit into 32 bits."""
    check_dense(name, x, "an int32 or int64 tensor")
    if x.dtype not in (torch.int32, torch.int64):
        hint = "lengths, pages and their running sums are integers: .to(torch.int32)"
        raise InputError(name, got=str(x.dtype), expected="torch.int32 or torch.int64", hint=hint)
    if x.dtype is torch.int64 and values_checked(x.device):
        low, high = host_range(x) or (0, 0)
        if low < -(2**31) or high >= 2**31:
            got = f"{low if low < -(2**31) else high} in an int64 tensor"
            raise InputError(name, got=got, expected="values of 32 bits", hint="lengths, pages, or their running sums")


def index(name: str, x: Any) -> torch.Tensor:
    """The tensor in int32, if `check_index` finds it in order."""
    check_index(name, x)
    found: torch.Tensor = as_int32(x)
    return found


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


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous, copied where it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def window_mask(causal: bool, window_size: Any) -> tw.Mask | None:
    """FlashAttention's `causal` and `window_size` (left, right), both inclusive; a negative side, or None, is no limit.

    Raises InputError unless `window_size` is a pair of integers or None.
    """
    check_flags(causal=causal)
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(side is None or isinstance(side, int) for side in sides):
        raise InputError(
            "window_size", got=shown(window_size), expected="(left, right), integers", hint="-1 is no limit"
        )
    left, right = (None if side is None or side < 0 else int(side) for side in sides)
    right = 0 if causal else right
    if left is None:
        return None if right is None else tw.causal if right == 0 else tw.window(None, right)
    return tw.window(left + 1, right)


def distance_score(softcap: Any, alibi_slopes: Any, batch: int, heads: int) -> tw.Score | None:
    """FlashAttention's `softcap`, then ALiBi with slopes (heads,) or (batch, heads).

    Raises InputError unless `softcap` is None or a finite number >= 0, and the slopes are such a tensor or None.
    """
    softcap = 0.0 if softcap is None else softcap
    symbolic = isinstance(softcap, (torch.SymInt, torch.SymFloat))
    if not symbolic and not (is_finite(softcap) and softcap >= 0):
        hint = "None turns it off too"
        raise InputError("softcap", got=shown(softcap), expected="0 for none, or a finite number > 0", hint=hint)
    score = tw.softcap(softcap) if softcap else None
    if alibi_slopes is None:
        return score
    hint, expected = "a slope for each query head, float32", f"a tensor {(heads,)} or {(batch, heads)}"
    if not isinstance(alibi_slopes, torch.Tensor) or not alibi_slopes.is_floating_point():
        got = alibi_slopes.dtype if isinstance(alibi_slopes, torch.Tensor) else type(alibi_slopes).__name__
        raise InputError("alibi_slopes", got=got, expected=expected, hint=hint)
    # extent by extent: under torch.compile a symbolic size equals none of a tuple's
    of_batch = alibi_slopes.ndim == 1 or (alibi_slopes.ndim == 2 and alibi_slopes.shape[0] == batch)
    if not of_batch or alibi_slopes.shape[-1] != heads:
        raise InputError("alibi_slopes", got=tuple(alibi_slopes.shape), expected=expected, hint=hint)
    return tw.alibi(alibi_slopes) if score is None else score >> tw.alibi(alibi_slopes)
