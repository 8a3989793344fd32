"""FlashInfer's functions that merge states: outputs and their log-sum-exp in base 2."""

from __future__ import annotations

from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.flashinfer.plan import LOG2_E, State, check, natural
from tilewise.core.errors import InputError


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> State:
    """Attention over the keys of two states.

    Args:
        v_a, v_b: outputs (tokens, heads, head_dim).
        s_a, s_b: their log-sum-exp (tokens, heads), base 2.

    Returns:
        (v, s) in the same shapes; v has the dtype of v_a.

    Raises:
        InputError: a tensor does not fit.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> first, second = ((torch.randn(8, 4, 16), torch.randn(8, 4)) for _ in range(2))
        >>> out, lse = flashinfer.merge_state(*first, *second)
    """
    o, lse = tw.merge(_state(v_a, s_a, "a"), _state(v_b, s_b, "b"), dtype=v_a.dtype)
    return o, lse.mT * LOG2_E


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """As `merge_state`, into the tensors of the first state.

    Args:
        v, s: a state, as in `merge_state`; both are overwritten.
        v_other, s_other: the other state.
        mask: bool (tokens,): the rows to merge; None merges all.

    Raises:
        InputError: a tensor does not fit.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> out, lse = torch.ones(8, 4, 16), torch.zeros(8, 4)
        >>> flashinfer.merge_state_in_place(out, lse, torch.zeros(8, 4, 16), torch.zeros(8, 4))
        >>> out[0, 0, 0], lse[0, 0]
        (tensor(0.5000), tensor(1.))
    """
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        expected = f"a bool tensor ({v.shape[0]},)"
        check("mask", mask, (v.shape[0],), torch.bool, expected)
        merged_v, merged_s = torch.where(mask[:, None, None], merged_v, v), torch.where(mask[:, None], merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> State:
    """Attention over the keys of several states.

    Args:
        v: outputs (tokens, states, heads, head_dim).
        s: their log-sum-exp (tokens, states, heads), base 2.

    Returns:
        (v, s): (tokens, heads, head_dim) in the dtype of v, and (tokens, heads), base 2.

    Raises:
        InputError: a tensor does not fit.

    Example:
        >>> import tilewise.adapters.flashinfer as flashinfer
        >>> out, lse = flashinfer.merge_states(torch.randn(8, 3, 4, 16), torch.randn(8, 3, 4))
    """
    _check_rank("v", v, 4)
    _check_rank("s", s, 3)
    lse = natural(s, v).permute(2, 0, 1)  # (states, heads, tokens)
    o, merged = tw.merge_states(v.transpose(0, 1), lse)
    return o, merged.mT * LOG2_E


def _state(v: torch.Tensor, s: torch.Tensor, which: str) -> State:
    _check_rank(f"v_{which}", v, 3)
    _check_rank(f"s_{which}", s, 2)
    return v, natural(s, v)


def _check_rank(name: str, x: Any, rank: int) -> None:
    if not isinstance(x, torch.Tensor) or x.ndim != rank or not x.is_floating_point():
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        hint = "(tokens, heads, dim) and (tokens, heads); with states, these come second"
        raise InputError(name, got=got, expected=f"a floating-point tensor of rank {rank}", hint=hint)
