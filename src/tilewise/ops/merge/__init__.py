"""Merging of attention states: what attention over parts of the keys gives, joined to attention over all of them.

A call is checked and collected (`problem`), matched to an implementation (`table`), and run through PyTorch's autograd
or as a custom operator (`torch_op`).
"""

from __future__ import annotations

import torch

from tilewise.core.tensors import plain, transformed
from tilewise.ops.merge import composed
from tilewise.ops.merge.problem import Call, joined_call, separate_call
from tilewise.ops.merge.table import choose
from tilewise.ops.merge.torch_op import compiled, eager

State = tuple[torch.Tensor, torch.Tensor]


def merge(*states: State, dtype: torch.dtype | None = None, impl: str | None = None) -> State:
    """Attention over all keys from attention over disjoint parts of them: w = softmax(lse), o = sum of w_n o_n.

    `tilewise.merge(tilewise.attention_with_lse(q, k1, v1), tilewise.attention_with_lse(q, k2, v2))` is what
    `attention_with_lse` gives for the keys of both. Differentiable in o and lse; second derivatives, `torch.func` and
    forward mode run in PyTorch's operations.

    Args:
        states: pairs (o, lse) of the same queries, as `attention_with_lse` returns them. o: (batch, seqlen, heads,
            head_dim_v), packed (total, heads, head_dim_v), unit stride in head_dim_v, float16, bfloat16 or float32 in
            any mixture, or all float64. lse: (batch, heads, seqlen), packed (heads, total), float32 (float64 for
            float64 o), natural logarithm.
        dtype: of the merged o, float16, bfloat16 or float32 (float64 for float64); None is the dtype of o, the wider
            one where they differ. Choose float32 for partial results that will be merged again.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        (o, lse) in the shapes of one state. Sums are float32 (float64 for float64), in the order of the states: the
        same bits in every run. A state with lse -inf has no weight, even if its o holds NaN; a row whose every lse is
        -inf gives (0, -inf). As in `torch.softmax`, an lse of +inf or NaN gives an o of NaN.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "Flash-Decoding",
    2023; Ye et al., "FlashInfer", 2025.

    Example:
        >>> first = tw.attention_with_lse(q, k[:, :60], v[:, :60])
        >>> second = tw.attention_with_lse(q, k[:, 60:], v[:, 60:])
        >>> o, lse = tw.merge(first, second)
        >>> torch.allclose(o, tw.attention(q, k, v), atol=1e-5)
        True
    """
    return _run(separate_call(states, dtype), impl)


def merge_states(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    indptr: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> State:
    """`merge` of states in one tensor: the same number of states for each row, or with `indptr` any number.

    Args:
        o: (states, batch, seqlen, heads, head_dim_v), packed (states, total, heads, head_dim_v); with `indptr`
            (total_states, heads, head_dim_v). Dtypes and strides as in `merge`.
        lse: (states, batch, heads, seqlen), packed (states, heads, total); with `indptr` (heads, total_states).
        indptr: int32 or int64 (rows + 1,), on the device of o: row r merges states indptr[r] to indptr[r + 1] - 1. It
            starts at 0, never falls and ends at total_states; a row may have no state. Its values are checked on a
            CPU, on a GPU only with TILEWISE_DEBUG=1.
        dtype, impl: as in `merge`.

    Returns:
        (o, lse) without the dimension of states; with `indptr` (rows, heads, head_dim_v) and (heads, rows).

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: as `merge`.

    Example:
        >>> parts = [tw.attention_with_lse(q, k[:, at : at + 50], v[:, at : at + 50]) for at in (0, 50)]
        >>> o, lse = tw.merge_states(torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts]))
        >>> torch.allclose(o, tw.attention(q, k, v), atol=1e-5)
        True
    """
    return _run(joined_call(o, lse, indptr, dtype), impl)


def _run(call: Call, impl: str | None) -> State:
    row, states = choose(call, impl), (*call.o, *call.lse)
    if plain(states):
        return eager(row, call)
    return composed.forward(call) if transformed(states) else compiled(row, call)
