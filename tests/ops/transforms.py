"""Public operations as functions of tensors, each with the same formula in PyTorch's own operations, for the tests of
derivatives, transforms and tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import tilewise as tw

Function = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """An operation of float tensors of these shapes, and its formula."""

    shapes: tuple[tuple[int, ...], ...]
    run: Function
    plain: Function

    def inputs(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(7)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in self.shapes)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, add: Any = None, sink: Any = None,
    lse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention of (batch, seqlen, heads, dim), or its lse, row by row the same as the library's."""
    group = q.shape[-2] // k.shape[-2]
    k, v = (x.repeat_interleave(group, -2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if add is not None:
        s = s + add
    rows, keys = s.shape[-2:]
    if causal:
        s = s.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1), -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
    if lse:
        return torch.logsumexp(s, -1)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1)[..., :keys], v)


Q, KV = (2, 3, 2, 4), (2, 4, 1, 4)
TARGET = torch.tensor([1, 3, -100, 0])
ENDS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # a sequence without a row among them
MASK = torch.tensor([[True, True, False, True, True]])
POSITIONS = torch.tensor([3, 0, 1])
ANGLES = tw.rope_tables(8, 4)


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = [dense(*(x[None, a:b] for x in (q, k, v)), causal=True)[0] for a, b in ((0, 2), (2, 5))]
    return torch.cat(parts)


def _merged(o1: torch.Tensor, o2: torch.Tensor, l1: torch.Tensor, l2: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(torch.stack([l1, l2]), 0).transpose(-1, -2)[..., None]
    lse = torch.logsumexp(torch.stack([l1, l2]), 0)
    return torch.cat([(weights * torch.stack([o1, o2])).sum(0), lse.transpose(-1, -2)[..., None]], -1)


def _state(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Both of a pair in one tensor."""
    return torch.cat([pair[0], pair[1].transpose(-1, -2)[..., None]], -1)


def _stacked(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return _merged(o[0], o[1], lse[0], lse[1])


def _ragged(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    pairs = [_merged(o[n : n + 1], o[n + 1 : n + 2], lse[:, n : n + 1], lse[:, n + 1 : n + 2]) for n in (0, 2)]
    return torch.cat(pairs)


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _turned(x: torch.Tensor) -> torch.Tensor:
    cos, sin = (table[POSITIONS].to(x.dtype)[None, :, None] for table in ANGLES)
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _turned_qkv(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([_turned(x[..., :3, :]), x[..., 3:, :]], -2)


def _loss(logits: torch.Tensor, e: float = 0.0, z: float = 0.0, reduction: str = "mean") -> torch.Tensor:
    lse = torch.logsumexp(logits, -1)
    own = logits.gather(-1, TARGET.clamp(min=0)[:, None])[:, 0]
    losses = (1 - e) * (lse - own) + e * (lse - logits.mean(-1)) + z * lse.square()
    losses = losses * (TARGET >= 0)
    return losses if reduction == "none" else losses.sum() / ((TARGET >= 0).sum() if reduction == "mean" else 1)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **how: Any) -> torch.Tensor:
    return _loss(20.0 * torch.tanh((x @ weight.t() + bias) / 20.0), **how)


def _rope(device: torch.device) -> tw.Rope:
    return tw.Rope(*(x.to(device) for x in (*ANGLES, POSITIONS)))


CASES: dict[str, Case] = {
    "attention": Case((Q, KV, KV), tw.attention, dense),
    "attention_causal": Case(
        (Q, KV, KV), lambda *x: tw.attention(*x, mask=tw.causal), lambda *x: dense(*x, causal=True)
    ),
    "attention_lse": Case(
        (Q, KV, KV),
        lambda *x: _state(tw.attention_with_lse(*x)),
        lambda *x: _state((dense(*x), dense(*x, lse=True))),
    ),
    "attention_packed": Case(
        ((5, 1, 4),) * 3, lambda *x: tw.attention(*x, mask=tw.causal, layout=tw.Packed(ENDS.to(x[0].device))), _packed
    ),
    "attention_sink": Case(
        (Q, KV, KV, (2,)), lambda q, k, v, s: tw.attention(q, k, v, sink=s), lambda q, k, v, s: dense(q, k, v, sink=s)
    ),
    "attention_captured": Case(
        (Q, KV, KV, (2, 4)),
        lambda q, k, v, t: tw.attention(q, k, v, score=lambda s, b, h, i, j: s + t[h, j] * 0.5),
        lambda q, k, v, t: dense(q, k, v, add=0.5 * t[:, None, :]),
    ),
    "attention_alibi": Case(
        (Q, KV, KV, (2,)),
        lambda q, k, v, t: tw.attention(q, k, v, score=tw.alibi(t)),
        lambda q, k, v, t: dense(
            q, k, v, add=-t[:, None, None] * (torch.arange(1, 4)[:, None] - torch.arange(4)).abs()
        ),
    ),
    "attention_bias": Case(
        (Q, KV, KV, (2, 2, 3, 4)),
        lambda q, k, v, t: tw.attention(q, k, v, score=tw.bias(t)),
        lambda q, k, v, t: dense(q, k, v, add=t),
    ),
    "merge": Case(
        ((2, 3, 2, 4), (2, 3, 2, 4), (2, 2, 3), (2, 2, 3)),
        lambda o1, o2, l1, l2: _state(tw.merge((o1, l1), (o2, l2))),
        _merged,
    ),
    "merge_states": Case(((2, 2, 3, 2, 4), (2, 2, 2, 3)), lambda o, l: _state(tw.merge_states(o, l)), _stacked),
    "merge_states_ragged": Case(
        ((4, 2, 4), (2, 4)),
        lambda o, l: _state(tw.merge_states(o, l, indptr=torch.tensor([0, 2, 4], dtype=torch.int32, device=o.device))),
        _ragged,
    ),
    "rms_norm": Case(((3, 6), (6,)), tw.rms_norm, _rms),
    "rms_norm_residual": Case(
        ((3, 6), (6,), (3, 6)),
        lambda x, w, r: torch.cat(tw.rms_norm(x, w, residual=r)),
        lambda x, w, r: torch.cat([_rms(x + r, w), x + r]),
    ),
    "layer_norm": Case(
        ((3, 6), (6,), (6,)), lambda *x: tw.layer_norm(*x), lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-5)
    ),
    "softmax": Case(
        ((3, 5),), lambda x: tw.softmax(x, mask=MASK.to(x.device), temperature=0.5),
        lambda x: torch.softmax((2.0 * x).masked_fill(~MASK, -torch.inf), -1),
    ),
    "log_softmax": Case(((3, 5),), lambda x: tw.log_softmax(x, 0), lambda x: torch.log_softmax(x, 0)),
    "swiglu": Case(((3, 5), (3, 5)), tw.swiglu, lambda g, u: F.silu(g) * u),
    "geglu": Case(((3, 10),), tw.geglu, lambda x: F.gelu(x[:, :5]) * x[:, 5:]),
    "geglu_tanh": Case(
        ((3, 5), (3, 5)), lambda *x: tw.geglu(*x, approximate="tanh"), lambda g, u: F.gelu(g, approximate="tanh") * u
    ),
    "reglu": Case(((3, 5), (3, 5)), tw.reglu, lambda g, u: F.relu(g) * u),
    "rope": Case(((1, 3, 2, 8),), lambda q: tw.rope(q, rope=_rope(q.device)), _turned),
    "rope_qkv": Case(((1, 3, 4, 8),), lambda x: torch.cat(tw.rope_qkv(x, 2, 1, rope=_rope(x.device)), -2), _turned_qkv),
    "cross_entropy": Case(
        ((4, 5),), lambda x: tw.cross_entropy(x, TARGET.to(x.device), label_smoothing=0.1, z_loss=0.01),
        lambda x: _loss(x, 0.1, 0.01),
    ),
    "cross_entropy_none": Case(
        ((4, 5),),
        lambda x: tw.cross_entropy(x, TARGET.to(x.device), reduction="none"),
        lambda x: _loss(x, reduction="none"),
    ),
    "linear_cross_entropy": Case(
        ((4, 6), (5, 6), (5,)),
        lambda x, w, b: tw.linear_cross_entropy(x, w, TARGET.to(x.device), bias=b, softcap=20.0, z_loss=0.01),
        lambda x, w, b: _linear(x, w, b, z=0.01),
    ),
    "linear_cross_entropy_none": Case(
        ((4, 6), (5, 6), (5,)),
        lambda x, w, b: tw.linear_cross_entropy(
            x, w, TARGET.to(x.device), bias=b, softcap=20.0, reduction="none", chunk=2
        ),
        lambda x, w, b: _linear(x, w, b, reduction="none"),
    ),
}  # fmt: skip
