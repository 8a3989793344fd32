"""The facts of one call of `qkv_prologue`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.readback import values_checked
from tilewise.core.real import is_finite
from tilewise.core.tensors import check_dense, plain, recorded
from tilewise.ops.kv_write.problem import Write, write_call, write_of
from tilewise.quant import ByChannel, Encoded
from tilewise.rotary import Rope, check_positions

_SHAPE = "(tokens, num_heads_q + 2 * num_heads_kv, head_dim)"


Parts = tuple[Any, Any, Any, Any, Any]  # qkv, k_pages, v_pages, q_norm, k_norm


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """Queries (tokens, heads, head_dim), and keys and values as they are written. Implementations read nothing else.

    `write` has the keys as they come, and the rope of both; `norms` are weights for each head of q and of k.
    """

    q: torch.Tensor
    write: Write
    norms: tuple[torch.Tensor, torch.Tensor] | None
    eps: float
    qk: torch.Tensor  # heads of q and of k, as they come

    @staticmethod
    def of(parts: Parts, slots: torch.Tensor, rope: Rope, eps: float) -> Call:
        """The call of parts that fit."""
        qkv, k_pages, v_pages, *norms = parts
        heads_kv = k_pages.shape[2]
        heads = qkv.shape[1] - 2 * heads_kv
        q, k, v = torch.split(qkv, [heads, heads_kv, heads_kv], 1)
        write = write_of(k, v, k_pages, v_pages, slots, rope)
        return Call(q, write, None if norms[0] is None else tuple(norms), eps, qkv[:, : heads + heads_kv])


def kind_of(parts: Parts) -> object:
    """What decides, beside values and where pages lie, whether a call is in order and who runs it; None for parts whose
    calls are checked each time.
    """
    if not plain(parts):
        return None
    found: list[Any] = [torch.is_grad_enabled()]
    for x in parts:
        found.append(x if x is None else (x.dtype, x.shape, x.stride(), x.device, x.requires_grad))
    return found


def make_call(parts: Parts, slots: Any, rope: Any, eps: float) -> Call:
    """The call of these arguments; raises InputError."""
    qkv, k_pages, v_pages, *norms = parts
    check_dense("qkv", qkv, f"a dense tensor {_SHAPE}", "the joint projection, its last dimension split in heads")
    pages = k_pages.shape if isinstance(k_pages, (torch.Tensor, Encoded, ByChannel)) else ()
    heads_kv = pages[2] if len(pages) == 4 else 0
    heads = qkv.shape[1] - 2 * heads_kv if qkv.ndim == 3 else 0
    if heads_kv and (heads < 1 or heads % heads_kv):
        raise InputError(
            "qkv",
            got=f"shape {tuple(qkv.shape)}, with k_pages {tuple(pages)}",
            expected=f"{_SHAPE}, num_heads_kv as k_pages has it and a divisor of num_heads_q",
            hint="view the projection as (tokens, heads, head_dim)",
        )
    if rope is None:
        raise InputError("rope", got="None", expected="a tilewise.Rope", hint="tilewise.kv_write needs none")
    if recorded((qkv,)):
        hint = "call rms_norm, rope and kv_write there"
        raise UnsupportedError("qkv_prologue", got="a call that PyTorch records", expected="an eager call", hint=hint)
    k, v = qkv[:, heads : heads + heads_kv], qkv[:, heads + heads_kv :]
    write_call(k, v, k_pages, v_pages, slots, rope)
    if values_checked(qkv.device):
        check_positions(rope)  # of all tokens: each has a query
    _check_norms(norms, qkv)
    return Call.of(parts, slots, rope, eps)


def check_eps(eps: Any) -> None:
    """Raise InputError unless it is a finite number, at least 0."""
    if not is_finite(eps) or eps < 0:
        raise InputError("eps", got=shown(eps), expected="a finite number, at least 0", hint="usual are 1e-6 and 1e-5")


def _check_norms(norms: Sequence[Any], qkv: torch.Tensor) -> None:
    given = dict(zip(("q_norm", "k_norm"), norms, strict=True))
    missing = [name for name, x in given.items() if x is None]
    if len(missing) == 2:
        return
    expected = f"{qkv.dtype} or torch.float32 ({qkv.shape[-1]},) on {qkv.device}"
    if missing:
        raise InputError(missing[0], got="None", expected=expected, hint="both q_norm and k_norm, or none of them")
    for name, x in given.items():
        check_dense(name, x, expected, "a weight for each column of a head")
        fits = x.shape == qkv.shape[-1:] and x.dtype in (qkv.dtype, torch.float32) and x.device == qkv.device
        gradient = x.requires_grad and torch.is_grad_enabled()
        if not fits or not x.is_contiguous() or gradient:
            raise InputError(
                name,
                got=f"{x.dtype} {tuple(x.shape)} on {x.device}" + ", with a gradient" * gradient,
                expected=f"{expected}, contiguous, without a gradient",
                hint="a weight for each column of a head, which all heads share",
            )
