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
    """Turn pairs of dimensions by the angles of each token's position (Su et al., "RoFormer: Enhanced Transformer with
    Rotary Position Embedding", 2021): (a, b) becomes (a cos - b sin, b cos + a sin).

    The bits are those of keys that `kv_write` turns. The backward turns gradients by the negated angles, and keeps
    nothing but the tables and positions.

    Args:
        q: (batch, seqlen, num_heads_q, head_dim) or packed (tokens, num_heads_q, head_dim), float16, bfloat16, float32
            or float64, any strides; without unit stride in head_dim it is copied first.
        k: the same with num_heads_kv heads, or None.
        rope: a `tilewise.Rope` of batch * seqlen positions, a sequence after the other, or of tokens: cos, sin and
            which pairs are turned. Its tensors take no gradient.
        inplace: write into q and k. Unit stride in head_dim is needed then, and no gradient is taken.
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        q turned, or (q, k) turned, contiguous, with the dtypes that came in; with `inplace` the tensors that came in.
        Dimensions of rotary_dim and above stay as they are.

    Positions (that the tables have them) are checked on a CPU, and on a GPU with TILEWISE_DEBUG=1, since reading them
    there would wait for it; inside torch.compile they are not looked at.

    Raises:
        InputError: an argument is wrong, or `inplace` where a gradient is taken.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
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
    """As `rope`, of queries and keys side by side with values, as one linear layer gives them. The backward writes all
    of qkv's gradient in one launch, where that of `torch.split` concatenates the gradients of q, k and v.

    Args:
        qkv: (batch, seqlen, num_heads_q + 2 num_heads_kv, head_dim) or packed (tokens, heads, head_dim): heads of
            queries, of keys, of values. float16, bfloat16, float32 or float64, any strides.
        num_heads_q, num_heads_kv: how many there are of each, 1 or more.
        rope: a `tilewise.Rope` of batch * seqlen positions, a sequence after the other, or of tokens, as for `rope`.
        impl: "triton", "cpu" or "reference"; None picks the first that can.

    Returns:
        (q, k, v): q and k turned, contiguous; v is a view of qkv.

    Positions are checked where `rope` checks them.

    Raises:
        InputError: an argument is wrong, or there are not as many heads as both numbers say.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.
    """
    check_joint(qkv, num_heads_q, num_heads_kv)
    q, k, v = torch.split(qkv, [num_heads_q, num_heads_kv, num_heads_kv], -2)
    call = make_call(q, k, rope)
    if qkv.requires_grad and torch.is_grad_enabled() and not transformed((qkv,)):
        return turn_joint(qkv, call, impl)
    turned = ROPE(call, impl)
    return turned[0], turned[1], v
