"""Rotary position embedding of queries and keys, both in one launch: into new tensors or in place."""

from __future__ import annotations

from typing import overload

import torch

from tilewise.core.flags import check_flags
from tilewise.core.tensors import check_all_dense, recorded, refuse_transforms, transformed
from tilewise.ops.rope.problem import check_inplace, check_joint, make_call
from tilewise.ops.rope.table import ROPE
from tilewise.ops.rope.torch_op import turn_in_place, turn_joint
from tilewise.rotary import Rope


@overload
def rope(
    q: torch.Tensor, k: None = None, *, rope: Rope, inplace: bool = False, impl: str | None = None
) -> torch.Tensor: ...


@overload
def rope(
    q: torch.Tensor, k: torch.Tensor, *, rope: Rope, inplace: bool = False, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rope(
    q: torch.Tensor, k: torch.Tensor | None = None, *, rope: Rope, inplace: bool = False, impl: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions: a pair of dimensions (a, b) becomes (a cos - b sin, b cos + a sin).

    The bits are those of keys that `kv_write(rope=...)` rotates. The backward rotates gradients by the negated angles,
    and keeps only tables and positions. Positions are checked on a CPU, and on a GPU only with TILEWISE_DEBUG=1, since
    reading them waits for the GPU; not inside `torch.compile`.

    Args:
        q: (batch, seqlen, num_heads_q, head_dim) or packed (tokens, num_heads_q, head_dim), float16, bfloat16, float32
            or float64, any strides; without unit stride in head_dim it is copied first.
        k: the same with num_heads_kv heads, or None.
        rope: a `tilewise.Rope` with batch * seqlen positions, one sequence after another, or `tokens` of them. Its
            tensors take no gradient.
        inplace: write into q and k, which needs unit stride in head_dim and no gradients.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        q, or (q, k), rotated, contiguous, with their dtypes; with `inplace` the tensors that came in. Dimensions from
        rotary_dim on stay as they are.

    Raises:
        InputError: an argument is wrong, or `inplace` where a gradient is wanted.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Example:
        >>> cos, sin = tw.rope_tables(16, 100)
        >>> positions = torch.arange(100).repeat(2)
        >>> rotated_q, rotated_k = tw.rope(q, k, rope=tw.Rope(cos, sin, positions))
    """
    check_flags(inplace=inplace)
    call = make_call(q, k, rope)
    if not inplace:
        turned = ROPE(call, impl)
        return turned[0] if k is None else (turned[0], turned[1])
    check_inplace(call)
    given = list(call.given.values())
    check_all_dense({**call.given, "rope.cos": call.cos, "rope.sin": call.sin, "rope.positions": call.positions})
    refuse_transforms("inplace", given)
    turn_in_place(call, impl, recorded(given))
    return q if k is None else (q, k)


def rope_qkv(
    qkv: torch.Tensor, num_heads_q: int, num_heads_kv: int, *, rope: Rope, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rope` of queries and keys in one tensor with values, as one linear layer gives them.

    The backward writes the gradient of qkv in one launch, where that of `torch.split` concatenates those of q, k and v.
    Positions are checked where `rope` checks them.

    Args:
        qkv: (batch, seqlen, num_heads_q + 2 num_heads_kv, head_dim) or packed (tokens, heads, head_dim): heads of
            queries, of keys, of values. float16, bfloat16, float32 or float64, any strides.
        num_heads_q, num_heads_kv: numbers of heads, at least 1.
        rope: as in `rope`.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        (q, k, v): q and k rotated, contiguous; v is a view of qkv.

    Raises:
        InputError: an argument is wrong, or the heads are not as many as both numbers say.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: as `rope`.

    Example:
        >>> cos, sin = tw.rope_tables(16, 100)
        >>> qkv = torch.randn(100, 4 + 2 + 2, 16)
        >>> rotated_q, rotated_k, values = tw.rope_qkv(qkv, 4, 2, rope=tw.Rope(cos, sin, torch.arange(100)))
    """
    check_joint(qkv, num_heads_q, num_heads_kv)
    q, k, v = torch.split(qkv, [num_heads_q, num_heads_kv, num_heads_kv], -2)
    call = make_call(q, k, rope)
    if qkv.requires_grad and torch.is_grad_enabled() and not transformed((qkv,)):
        return turn_joint(qkv, call, impl)
    turned = ROPE(call, impl)
    return turned[0], turned[1], v
