"""What the demo's model computes with beside matrix products: the library's operators, or PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import Rope

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
EPS = 1e-5


@dataclass(frozen=True)
class Operators:
    """attend(q, k, v) -> o, causal, tensors (batch, seqlen, heads, head_dim); rotate(qkv, num_heads_q, num_heads_kv,
    rope) -> (q, k, v), q and k turned; norm(x, residual, weight) -> (normed sum, sum), the residual None at first;
    swiglu(gate and up side by side); loss(x, weight, targets): the mean cross entropy of a last linear layer.
    """

    attend: Attend
    rotate: Callable[[Tensor, int, int, Rope], tuple[Tensor, Tensor, Tensor]]
    norm: Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]


def tilewise_operators(impl: str | None = None) -> Operators:
    """The library's; `impl` is asked for in attention where gradients are, None: the best."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Generation has other shapes than training: one query, many keys. An implementation need not do both.
        named = impl if torch.is_grad_enabled() else None
        return tilewise.attention(q, k, v, mask=tilewise.causal, impl=named)

    def norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if residual is None:
            return tilewise.rms_norm(x, weight, eps=EPS), x  # type: ignore[return-value]
        return tilewise.rms_norm(x.to(residual.dtype), weight, residual=residual, eps=EPS)  # type: ignore[return-value]

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return tilewise.linear_cross_entropy(x.to(kind), weight.to(kind), targets)

    def rotate(qkv: Tensor, num_heads_q: int, num_heads_kv: int, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        return tilewise.rope_qkv(qkv, num_heads_q, num_heads_kv, rope=rope)

    return Operators(attend, rotate, norm, tilewise.swiglu, loss)


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own causal attention, in the library's layout (training only: as many queries as keys)."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return o.transpose(1, 2)


def _rotate(qkv: Tensor, num_heads_q: int, num_heads_kv: int, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.split(qkv, [num_heads_q, num_heads_kv, num_heads_kv], dim=2)
    cos, sin = (table[rope.positions].view(*q.shape[:2], 1, -1).to(q.dtype) for table in (rope.cos, rope.sin))

    def turned(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    return turned(q), turned(k), v


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x if residual is None else x + residual
    return F.rms_norm(s, weight.shape, weight, EPS), s


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), targets.flatten())


TORCH_OPERATORS = Operators(torch_attention, _rotate, _norm, _swiglu, _loss)
