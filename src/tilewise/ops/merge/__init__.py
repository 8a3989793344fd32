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
    `attention_with_lse` gives for the keys of both. Method: the rescaled sums of online softmax (Milakov and Gimelshein
    2018), as Flash-Decoding (Dao et al. 2023) and FlashInfer (Ye et al. 2025) merge with them.

    Args:
        states: pairs (o, lse) of the same queries, as `attention_with_lse` returns them. o: (batch, seqlen, heads,
            head_dim_v), packed (total, heads, head_dim_v), unit stride in head_dim_v, float16, bfloat16 or float32 in
            any mixture, or all float64. lse: (batch, heads, seqlen), packed (heads, total), float32 (float64 for
            float64 o), natural logarithm.
        dtype: of the merged o, float16, bfloat16 or float32 (float64 for float64); None takes the dtype of o, the wider
            where they differ. Partial results that will be merged again lose nothing as float32.
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        (o, lse) in the shapes of one state; sums are float32 (float64 for float64), taken in the order of the states,
        so bits repeat.

    A state with lse -inf saw no key: it weighs nothing, whatever its o holds, NaN too. (0, -inf) is what a row gives
    whose every lse is -inf. As in `torch.softmax`, an lse of +inf gives an o of NaN, and NaN gives NaN. Differentiable
    in o and lse; second derivatives, `torch.func` and forward mode go through PyTorch's operations.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
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
    """As `merge`, for states that lie in one tensor: as many for each row, or with `indptr` any number.

    Args:
        o: (states, batch, seqlen, heads, head_dim_v), packed (states, total, heads, head_dim_v); with `indptr`
            (total_states, heads, head_dim_v). dtypes and stride as `merge` has them.
        lse: (states, batch, heads, seqlen), packed (states, heads, total); with `indptr` (heads, total_states).
        indptr: int32 (rows + 1,), contiguous, on the device of o: row r merges states indptr[r] to indptr[r + 1] - 1.
            It starts at 0, never falls and ends at total_states; a row may have no state. Its values are checked once
            for each version of the tensor, which reads it on the host, in a compiled region when it runs; while a CUDA
            graph is captured they are taken as they are.
        dtype, impl: as `merge` has them.

    Returns:
        (o, lse) without the dimension of states; with `indptr` (rows, heads, head_dim_v) and (heads, rows).

    Raises InputError and UnsupportedError as `merge` does.
    """
    return _run(joined_call(o, lse, indptr, dtype), impl)


def _run(call: Call, impl: str | None) -> State:
    row, states = choose(call, impl), (*call.o, *call.lse)
    if plain(states):
        return eager(row, call)
    return composed.forward(call) if transformed(states) else compiled(row, call)
