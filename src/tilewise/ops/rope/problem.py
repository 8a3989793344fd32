"""The facts of one call of `rope`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.overlap import check_apart
from tilewise.core.tensors import check_dense
from tilewise.rotary import Rope, check_angles, check_rope

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHAPE = "(batch, seqlen, heads, head_dim) or (tokens, heads, head_dim)"


@dataclass(eq=False, slots=True)
class Call:
    """One call. `positions` have the shape of q before its heads. Implementations read this and nothing else; in a
    backward q and k are None.
    """

    q: torch.Tensor | None
    k: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    heads_q: int
    heads_k: int
    dim: int
    interleaved: bool
    dtype: torch.dtype

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """q, and k where there is one."""
        return {name: x for name, x in (("q", self.q), ("k", self.k)) if x is not None}


def make_call(q: Any, k: Any, rope: Any) -> Call:
    """The call of `rope`; raises InputError."""
    _check_tensor("q", q)
    if k is not None:
        _check_tensor("k", k)
        if k.dtype != q.dtype or k.device != q.device:
            raise InputError(
                "k", got=f"{k.dtype} on {k.device}", expected=f"{q.dtype} on {q.device}, as q", hint="use k.to(q)"
            )
        if k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
            raise InputError(
                "k",
                got=f"shape {tuple(k.shape)}",
                expected=f"{(*q.shape[:-2], 'num_heads_kv', q.shape[-1])}, as q has tokens and head_dim",
                hint="rotate tensors of other tokens in another call",
            )
    if not isinstance(rope, Rope):
        raise InputError(
            "rope", got=type(rope).__name__, expected="a tilewise.Rope", hint="Rope(*rope_tables(...), positions)"
        )
    check_rope(rope, "q", q)
    check_angles(rope)
    positions = rope.positions.view(q.shape[:-2])
    heads_k = 0 if k is None else k.shape[-2]
    return Call(q, k, rope.cos, rope.sin, positions, q.shape[-2], heads_k, q.shape[-1], rope.interleaved, q.dtype)


def check_inplace(call: Call) -> None:
    """Raise InputError unless q and k may be written to."""
    for name, x in call.given.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "inplace",
                got=f"True, with {name} taking a gradient",
                expected="False where gradients are taken",
                hint="leave inplace out, or call it under torch.no_grad()",
            )
        shared = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
        if shared or (x.stride(-1) != 1 and x.shape[-1] > 1):
            raise InputError(
                name,
                got=f"strides {x.stride()}",
                expected="unit stride in head_dim and no overlapping elements, to be written in place",
                hint="leave inplace out",
            )
    if call.k is not None:
        check_apart("k", call.given["k"], "q", call.given["q"])


def results(call: Call) -> dict[str, torch.Tensor]:
    """An empty q, and k where there is one."""
    return {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in call.given.items()}


def gradients(call: Call, kept: dict[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    """Empty dq and dk; "qkv" is one tensor for both with dv behind them."""
    heads, lead = {"q": call.heads_q, "k": call.heads_k, "qkv": call.heads_q + 2 * call.heads_k}, call.positions.shape
    return {
        name: torch.empty((*lead, heads[name], call.dim), dtype=call.dtype, device=call.positions.device)
        for name in wanted
    }


def parts(
    call: Call, incoming: Sequence[torch.Tensor], gradients: dict[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """What a backward turns back, and of dqkv copies: (name, gradient that came in, where it goes)."""
    into = gradients
    if "qkv" in gradients:
        heads = [call.heads_q, call.heads_k, call.heads_k]
        into = dict(zip("qkv", torch.split(gradients["qkv"], heads, -2), strict=True))
    return [(name, do, into[name]) for name, do in zip("qkv", incoming, strict=False) if name in into]


def check_joint(qkv: Any, num_heads_q: Any, num_heads_kv: Any) -> None:
    """Raise InputError unless qkv has that many heads of queries, of keys and of values."""
    for name, heads in (("num_heads_q", num_heads_q), ("num_heads_kv", num_heads_kv)):
        if not isinstance(heads, (int, torch.SymInt)) or isinstance(heads, bool) or heads < 1:
            raise InputError(name, got=shown(heads), expected="a whole number, 1 or more", hint="a number of heads")
    _check_tensor("qkv", qkv)
    heads = num_heads_q + 2 * num_heads_kv
    if qkv.shape[-2] != heads:
        raise InputError(
            "qkv",
            got=f"{qkv.shape[-2]} heads, of shape {tuple(qkv.shape)}",
            expected=f"{heads}: num_heads_q {num_heads_q} + 2 * num_heads_kv {num_heads_kv}",
            hint="queries come first, then keys, then values; use .unflatten(-1, (heads, head_dim))",
        )


def _check_tensor(name: str, x: Any) -> None:
    check_dense(name, x, f"a dense tensor {_SHAPE}", "heads come before their dimension")
    if x.ndim not in (3, 4) or x.shape[-1] < 1 or x.shape[-2] < 1:
        raise InputError(
            name,
            got=f"shape {tuple(x.shape)}",
            expected=f"{_SHAPE}, of one head or more",
            hint="use .unflatten(-1, (heads, head_dim))",
        )
    if x.dtype not in DTYPES:
        raise InputError(
            name, got=str(x.dtype), expected="float16, bfloat16, float32 or float64", hint="convert it with .to()"
        )
