"""The facts of one attention call, validated once, with the messages a user sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import host_values
from tilewise.formula.check import check_indices, reads_values
from tilewise.formula.formula import as_mask, as_score
from tilewise.formula.structure import Bound
from tilewise.layouts import Dense, Packed, check_cu_seqlens

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CAPTURED = (*DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Signature:
    """Sizes, strides and types of a call's tensors and the structure of its formula.

    Equal ones are one object, so that whatever is remembered for a kind of call is found without hashing these parts.
    """


@dataclass(eq=False, slots=True)  # not frozen: that would triple the time it takes to make one
class Call:
    """One call of attention: its tensors, its formula and its sizes. Implementations read this and nothing else.

    q, k, v are (batch, seqlen, heads, dim), or (total, heads, dim) with `cu_seqlens_q` and `cu_seqlens_k` when packed.
    `mask` and `score` are None when there is nothing to apply. `seed` is an int64 tensor of one element when `dropout`
    > 0. The last fields say which gradients are wanted.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: torch.Tensor | None
    mask: Bound | None
    score: Bound | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    scale: float
    dropout: float
    seed: torch.Tensor | None
    deterministic: bool = False
    wants_grad: bool = False
    grad_sink: bool = False
    grad_captured: tuple[bool, ...] = ()  # by slot of the score's tensors
    signature: Signature | None = None  # None where sizes are symbolic
    first_batch: int = 0  # what `b` is for the first batch element (one sequence taken out of a packed call)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def rows_q(self) -> int:
        """seqlen_q, or the total of all sequences."""
        return self.q.shape[-3]

    @property
    def rows_k(self) -> int:
        return self.k.shape[-3]

    @property
    def num_heads_q(self) -> int:
        return self.q.shape[-2]

    @property
    def num_heads_kv(self) -> int:
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.q.shape[-2] // self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    def new_output(self) -> torch.Tensor:
        q = self.q
        if q.shape[-1] == self.v.shape[-1]:
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        return torch.empty(*q.shape[:-1], self.v.shape[-1], dtype=q.dtype, device=q.device)

    def new_lse(self) -> torch.Tensor:
        q = self.q
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        *batch, rows, heads, _ = q.shape
        return torch.empty(*batch, heads, rows, dtype=dtype, device=q.device)


def make_call(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    score: Any = None,
    sink: Any = None,
    layout: Any = None,
    scale: Any = None,
    dropout: Any = 0.0,
    seed: Any = None,
    deterministic: bool = False,
) -> Call:
    """Check every argument of `attention` and collect them; raises InputError or FormulaError before any work."""
    layout = _layout(layout)
    packed = isinstance(layout, Packed)
    bound_mask = None if mask is None else as_mask(mask).bound
    bound_score = None if score is None else as_score(score).bound
    signature = signature_of(q, k, v, bound_mask, bound_score, packed)
    captures = any(bound is not None and len(bound.tensors) > 0 for bound in (bound_mask, bound_score))
    numbers = (bound_mask and bound_mask.numbers, bound_score and bound_score.numbers) if captures else None
    checked = signature is not None and (signature, numbers) in _checked
    if not checked:
        _tensors(q, k, v, 3 if packed else 4)
        _shapes(q, k, v, packed)
        for what, bound in (("mask", bound_mask), ("score", bound_score)):
            if bound is not None:
                _captured(bound, what, q)
    if packed:
        check_cu_seqlens("layout cu_seqlens_q", layout.cu_seqlens_q, q.shape[0], q.device)
        check_cu_seqlens("layout cu_seqlens_k", layout.keys, k.shape[0], q.device)
        if layout.keys.shape != layout.cu_seqlens_q.shape:
            raise InputError(
                "layout cu_seqlens_k",
                got=tuple(layout.keys.shape),
                expected=f"{tuple(layout.cu_seqlens_q.shape)} as cu_seqlens_q",
                hint="one entry more than there are sequences, for queries and keys alike",
            )
    if sink is not None:
        _sink(sink, q)
    dropout = _dropout(dropout)
    grad = torch.is_grad_enabled()
    grad_sink = grad and sink is not None and sink.requires_grad
    grad_captured = () if bound_score is None else tuple(grad and t.requires_grad for t in bound_score.tensors)
    call = Call(
        q,
        k,
        v,
        sink,
        bound_mask,
        bound_score,
        layout.cu_seqlens_q if packed else None,
        layout.keys if packed else None,
        _scale(scale, q.shape[-1]),
        dropout,
        _seed(seed, q.device, dropout),
        deterministic,
        grad and (q.requires_grad or k.requires_grad or v.requires_grad or grad_sink or any(grad_captured)),
        grad_sink,
        grad_captured,
        signature,
    )
    if not checked:
        if captures:
            _indices(call)
        formulas = [bound.text for bound in (bound_mask, bound_score) if bound is not None]
        if signature is not None and not (captures and (packed or any(map(reads_values, formulas)))):
            if len(_checked) > 4096:
                _checked.clear()
            _checked.add((signature, numbers))
    return call


_checked: set[Any] = set()  # signatures and numbers of calls whose tensors were found in order


def signature_of(q: Any, k: Any, v: Any, mask: Bound | None, score: Bound | None, packed: bool) -> Signature | None:
    """The signature of these arguments; None while compiling, or for what is no tensor."""
    tensors = isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    if torch.compiler.is_compiling() or not tensors or not q.ndim == k.ndim == v.ndim == 4 - packed:
        return None
    parts: list[Any] = [packed]
    for x in (q, k, v):
        parts += (x.dtype, x.device, x.shape, x.stride())
    for bound in (mask, score):
        if bound is None:
            parts.append(None)
            continue
        parts.append(bound.text)
        for x in bound.tensors:
            parts += (x.dtype, x.device, x.shape, x.stride())
    key = tuple(parts)
    known = _signatures.get(key)
    if known is None:
        if len(_signatures) > 16384:
            _signatures.clear()
        known = _signatures[key] = Signature()
    return known


_signatures: dict[tuple[Any, ...], Signature] = {}


def _indices(call: Call) -> None:
    """Raise FormulaError if a captured tensor could be read outside (packed lengths count where they can be read)."""
    lengths = [(call.rows_q, call.rows_k)] * min(call.batch, 1)
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        ends_q, ends_k = host_values(call.cu_seqlens_q), host_values(call.cu_seqlens_k)
        if ends_q is None or ends_k is None:
            return
        steps_q, steps_k = ([b - a for a, b in itertools.pairwise(ends)] for ends in (ends_q, ends_k))
        lengths = list(zip(steps_q, steps_k, strict=True))
    lengths = [(rows_q, rows_k) for rows_q, rows_k in lengths if rows_q and rows_k]
    if not lengths:
        return
    first = min(rows_k - rows_q for rows_q, rows_k in lengths)  # the position of the first query
    sizes = (call.batch, call.num_heads_q, first, max(rows_k for _, rows_k in lengths))
    for what, bound in (("mask", call.mask), ("score", call.score)):
        if bound is not None:
            check_indices(bound, what, sizes)


def _layout(layout: Any) -> Dense | Packed:
    if layout is None:
        return Dense()
    if not isinstance(layout, (Dense, Packed)):
        raise InputError(
            "layout",
            got=type(layout).__name__,
            expected="tilewise.Dense() or tilewise.Packed(cu_seqlens_q, cu_seqlens_k)",
            hint="leave it out for tensors of shape (batch, seqlen, heads, dim)",
        )
    return layout


def _tensors(q: Any, k: Any, v: Any, rank: int) -> None:
    shape = "(total, heads, dim)" if rank == 3 else "(batch, seqlen, heads, dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise InputError(
                name, got=type(x).__name__, expected=f"a tensor {shape}", hint="convert it with torch.as_tensor"
            )
        if x.is_nested or x.layout != torch.strided:
            raise InputError(
                name,
                got=f"a {'nested' if x.is_nested else x.layout} tensor",
                expected=f"a dense tensor {shape}",
                hint="sequences of different lengths go through layout=tilewise.Packed(cu_seqlens)",
            )
        if x.ndim != rank:
            hint = (
                "packed sequences need layout=tilewise.Packed(cu_seqlens)"
                if x.ndim == 3
                else "dense layout; see `layout=`"
            )
            if rank == 3:
                hint = "the packed layout has no batch dimension: x.flatten(0, 1)"
            raise InputError(name, got=f"shape {tuple(x.shape)}", expected=shape, hint=hint)
        if x.dtype != q.dtype:
            raise InputError(
                name, got=str(x.dtype), expected=f"{q.dtype}, the dtype of q", hint="q, k and v share one dtype"
            )
        if x.device != q.device:
            raise InputError(
                name, got=f"device {x.device}", expected=f"{q.device}, the device of q", hint="move it: .to(q.device)"
            )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise InputError(
                name,
                got=f"strides {x.stride()}",
                expected="unit stride in the last dimension",
                hint="call .contiguous()",
            )
    if q.dtype not in DTYPES:
        raise InputError(
            "q",
            got=str(q.dtype),
            expected="float16, bfloat16, float32 or float64",
            hint="low-bit input goes through quantize=",
        )


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    if k.shape[:-1] != v.shape[:-1]:
        raise InputError(
            "v",
            got=f"shape {tuple(v.shape)}",
            expected=f"{tuple(k.shape[:-1])} and a head_dim, as k has",
            hint="keys and values come in pairs; only their head_dim may differ",
        )
    if q.shape[-1] != k.shape[-1]:
        raise InputError(
            "k",
            got=f"head_dim {k.shape[-1]}",
            expected=f"{q.shape[-1]}, the head_dim of q",
            hint="shapes are (..., seqlen, heads, head_dim): heads before head_dim",
        )
    if not packed and q.shape[0] != k.shape[0]:
        raise InputError(
            "k",
            got=f"batch {k.shape[0]}",
            expected=f"{q.shape[0]}, the batch of q",
            hint="expand it: k.expand(batch, -1, -1, -1) copies nothing",
        )
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv or heads_q == 0:
        raise InputError(
            "k",
            got=f"{heads_kv} heads",
            expected=f"a divisor of the {heads_q} query heads",
            hint="each key/value head serves num_heads_q / num_heads_kv query heads",
        )
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= 512:
            raise InputError(
                name,
                got=f"head_dim {x.shape[-1]}",
                expected="1 to 512",
                hint="split the heads: they are what is narrow",
            )


def _sink(sink: Any, q: torch.Tensor) -> None:
    expected = f"a floating-point tensor ({q.shape[-2]},) on {q.device}: one logit a query head"
    if (
        not isinstance(sink, torch.Tensor)
        or sink.shape != (q.shape[-2],)
        or not sink.is_floating_point()
        or sink.device != q.device
    ):
        got = (
            f"{sink.dtype} {tuple(sink.shape)} on {sink.device}"
            if isinstance(sink, torch.Tensor)
            else type(sink).__name__
        )
        raise InputError("sink", got=got, expected=expected, hint="a constant: torch.full((num_heads_q,), value)")


def _captured(bound: Bound, what: str, q: torch.Tensor) -> None:
    for slot, tensor in enumerate(bound.tensors):
        if tensor.dtype not in CAPTURED or tensor.layout != torch.strided:
            raise InputError(
                f"{what}: captured tensor {slot}",
                got=f"{tensor.dtype}, {tensor.layout}",
                expected="a dense tensor of booleans, integers (signed, or uint8) or floats",
                hint="convert it before the formula captures it",
            )
        if tensor.device != q.device:
            raise InputError(
                f"{what}: captured tensor {slot}",
                got=f"device {tensor.device}",
                expected=f"{q.device}, the device of q",
                hint="move it before the formula captures it",
            )


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise InputError(
            "scale",
            got="a tensor that takes a gradient",
            expected="a number",
            hint="multiply q by it, or write score=lambda s, b, h, i, j: s * scale",
        )
    try:
        value = float(scale)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise InputError("scale", got=repr(scale), expected="a finite number", hint="the default is head_dim ** -0.5")
    return value


def _dropout(dropout: Any) -> float:
    if not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise InputError(
            "dropout", got=repr(dropout), expected="a probability in [0, 1)", hint="0.0 turns it off, as in evaluation"
        )
    return float(dropout)


def _seed(seed: Any, device: torch.device, dropout: float) -> torch.Tensor | None:
    """A seed on the device: drawn from PyTorch's generator (advances under CUDA graph replay), or the caller's."""
    if isinstance(seed, torch.Tensor) and seed.numel() == 1 and seed.dtype == torch.int64 and seed.device == device:
        return seed.reshape(1) if dropout else None
    if seed is None or (isinstance(seed, int) and 0 <= seed < 2**63):
        if not dropout:
            return None
        if seed is None:
            return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    raise InputError(
        "seed",
        got=repr(seed),
        expected=f"an integer in [0, 2**63) or an int64 tensor of one element on {device}",
        hint="None draws one from PyTorch's generator",
    )


def sequences(call: Call) -> Sequence[tuple[int, slice, slice]]:
    """(batch index, rows of q, rows of k) of each sequence of a packed call, on the host."""
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return [
        (b, slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])) for b in range(len(starts_q) - 1)
    ]
