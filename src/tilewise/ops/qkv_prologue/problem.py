"""The facts of one call of `qkv_prologue`, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.readback import values_checked
from tilewise.core.real import is_finite
from tilewise.core.tensors import check_dense, not_dense, plain, recorded, refuse_transforms
from tilewise.ops.kv_write.problem import DTYPES, Write, write_call, write_of
from tilewise.quant import ByChannel, Encoded
from tilewise.rotary import Rope, check_positions, check_rope

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
    _check_qkv(qkv)
    if rope is None:
        raise InputError("rope", got="None", expected="a tilewise.Rope", hint="tilewise.kv_write needs none")
    check_rope(rope, "qkv", qkv)
    if recorded((qkv,)):
        hint = "call rms_norm, rope and kv_write there"
        raise UnsupportedError("qkv_prologue", got="a call that PyTorch records", expected="an eager call", hint=hint)
    heads, heads_kv = _heads(qkv, k_pages, v_pages)
    k, v = qkv[:, heads : heads + heads_kv], qkv[:, heads + heads_kv :]
    write_call(k, v, k_pages, v_pages, slots, rope)
    if values_checked(qkv.device):
        check_positions(rope)  # of all tokens: each has a query
    _check_norms(norms, qkv)
    return Call.of(parts, slots, rope, eps)


def _check_qkv(qkv: Any) -> None:
    """What `kv_write` checks of keys and values, by the name that they have here."""
    check_dense("qkv", qkv, f"a dense tensor {_SHAPE}", "the joint projection, its last dimension split in heads")
    refuse_transforms("qkv_prologue", (qkv,))
    fits = qkv.ndim == 3 and qkv.shape[2] > 0 and qkv.dtype in DTYPES and (qkv.stride(2) == 1 or qkv.shape[2] == 1)
    gradient = qkv.requires_grad and torch.is_grad_enabled()
    if not fits or gradient:
        raise InputError(
            "qkv",
            got=f"{qkv.dtype} {tuple(qkv.shape)}, strides {qkv.stride()}" + ", with a gradient" * gradient,
            expected=f"float16, bfloat16 or float32 {_SHAPE}, unit stride in head_dim, without a gradient",
            hint="view the projection as (tokens, heads, head_dim); call it under torch.no_grad()",
        )


def _heads(qkv: torch.Tensor, k_pages: Any, v_pages: Any) -> tuple[int, int]:
    """(heads of q, heads of k); zeros for pages of which `kv_write` has to say what is wrong."""
    pages = {"k_pages": k_pages, "v_pages": v_pages}
    if not all(isinstance(x, (Encoded, ByChannel)) or not_dense(x) is None for x in pages.values()):
        return 0, 0
    if not all(len(x.shape) == 4 for x in pages.values()):
        return 0, 0
    heads_kv = k_pages.shape[2]
    heads = qkv.shape[1] - 2 * heads_kv
    if heads_kv < 1:
        raise InputError("k_pages", got=f"shape {tuple(k_pages.shape)}", expected="1 head or more", hint=_SHAPE)
    if heads < 1 or heads % heads_kv:
        raise InputError(
            "qkv",
            got=f"shape {tuple(qkv.shape)}, with k_pages {tuple(k_pages.shape)}",
            expected=f"{_SHAPE}, num_heads_kv as k_pages has it and a divisor of num_heads_q",
            hint="view the projection as (tokens, heads, head_dim)",
        )
    for name, x in pages.items():
        raw = x.open if isinstance(x, ByChannel) else x  # numbers of the dtype of qkv, or codes
        dtype = qkv.dtype if isinstance(raw, Encoded) else raw.dtype
        if x.shape[3] != qkv.shape[2] or dtype != qkv.dtype or x.device != qkv.device:
            raise InputError(
                name,
                got=f"{dtype} {tuple(x.shape)} on {x.device}",
                expected=f"{qkv.dtype} (..., {qkv.shape[2]}) on {qkv.device}, as qkv",
                hint="keys and values are as wide as queries; `tilewise.kv_write` takes values of another width",
            )
    return heads, heads_kv


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
        refuse_transforms("qkv_prologue", (x,))
        fits = x.shape == qkv.shape[-1:] and x.dtype in (qkv.dtype, torch.float32) and x.device == qkv.device
        gradient = x.requires_grad and torch.is_grad_enabled()
        if not fits or not x.is_contiguous() or gradient:
            raise InputError(
                name,
                got=f"{x.dtype} {tuple(x.shape)} on {x.device}" + ", with a gradient" * gradient,
                expected=f"{expected}, contiguous, without a gradient",
                hint="a weight for each column of a head, which all heads share",
            )
