"""The checks of attention's arguments, one by one, with the messages a user sees."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.readback import being_traced, host_values
from tilewise.core.tensors import check_all_dense, check_dense, recorded, transformed
from tilewise.formula.structure import Bound
from tilewise.layouts import Dense, Packed, Paged, in_int32
from tilewise.quant import ByChannel, Encoded, Quantized
from tilewise.quant.schemes import Scheme

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENCODABLE = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_ENCODABLE = 256  # head dimension
CAPTURED = (*DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


Packing = tuple[torch.Tensor | None, torch.Tensor | None]

_DENSE = Dense()


def layout_of(layout: Any) -> Dense | Packed | Paged:
    """The layout, its index tensors in int32; None is dense."""
    if layout is None:
        return _DENSE
    if not isinstance(layout, (Dense, Packed, Paged)):
        raise InputError(
            "layout",
            got=type(layout).__name__,
            expected="tilewise.Dense(), tilewise.Packed(cu_seqlens_q) or tilewise.Paged(block_table, seqlens_k)",
            hint="leave it out for tensors of shape (batch, seqlen, heads, dim)",
        )
    return layout if isinstance(layout, Dense) else in_int32(layout)


def check_encoded(q: Any, k: Any, v: Any, layout: Dense | Packed | Paged) -> None:
    """Keys and values of which one is encoded: both are, alike or keys by channel, in pages, where q is."""
    by_channel = isinstance(k, ByChannel)
    for name, x, other in (("k", k, "v"), ("v", v, "k")):
        if not isinstance(x, Encoded) and not (by_channel and name == "k"):
            raise InputError(
                name,
                got=type(x).__name__,
                expected=f"a tilewise.quant.Encoded, as {other} is",
                hint="encode both, or `tilewise.quant.decode` the other",
            )
    if not isinstance(layout, Paged):
        raise InputError(
            "k",
            got=f"{'a ByChannel' if by_channel else 'an Encoded'} with layout {type(layout).__name__}",
            expected="layout=tilewise.Paged(...)",
            hint=f"`{'ByChannel.keys' if by_channel else 'tilewise.quant.decode'}` gives a tensor for other layouts",
        )
    if by_channel:
        k.check_places()
    elif v.kind != k.kind:
        raise InputError("v", got=f"codes {v.kind!r}", expected=f"{k.kind!r}, as k has", hint="encode both alike")
    for name, x in (("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise InputError(
                name,
                got=f"an Encoded of shape {x.shape}",
                expected="(num_pages, page_size, heads, dim)",
                hint="see `tilewise.Paged`",
            )
        if isinstance(q, torch.Tensor) and x.device != q.device:
            raise InputError(
                name, got=f"device {x.device}", expected=f"{q.device}, the device of q", hint="encode it there"
            )


def check_codes(codes: Quantized, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> None:
    """Codes that are of tensors like these, whose cumulative lengths (None of dense ones) `packing` are."""
    of = codes.layout
    tensors = codes.tensors
    check_all_dense({f"quantize {name}": x for name, x in tensors.items()})
    packed = (of.cu_seqlens_q, of.keys) if isinstance(of, Packed) else (None, None)
    dims = codes.v.shape[-1] if codes.v_scale is None else codes.v.shape[-2]
    like = (codes.q.shape, codes.k.shape, dims, codes.q.device)
    good = like == (q.shape, k.shape, v.shape[-1], q.device) and len({x.device for x in tensors.values()}) == 1
    for x, y in zip(packed, packing, strict=True):
        good = good and (x is None) is (y is None)
        if good and x is not None and y is not None and x is not y:
            good = x.shape == y.shape and host_values(x) == host_values(y)
    if not good or being_traced():
        raise InputError(
            "quantize",
            got=f"codes {'inside torch.compile' if being_traced() else f'of other tensors, q {tuple(codes.q.shape)}'}",
            expected="codes that quantize_qkv made of q, k and v, in this layout, outside a compiled region",
            hint="pass a scheme, and codes are made in the call",
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise InputError(
            "quantize",
            got="codes, and tensors that take a gradient",
            expected="no gradient",
            hint="pass a scheme, whose gradients go straight through the rounding",
        )


def check_encodable(scheme: Scheme, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise InputError unless a scheme can make codes of tensors of these dtypes and head dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in ENCODABLE:
            raise InputError(
                name, got=str(x.dtype), expected="float16, bfloat16 or float32", hint="codes need no float64"
            )
        if x.shape[-1] > WIDEST_ENCODABLE:
            raise InputError(
                name,
                got=f"head_dim {x.shape[-1]}",
                expected=f"1 to {WIDEST_ENCODABLE}",
                hint="wider heads stay in 16 bits",
            )
    head_dim = q.shape[-1]
    if scheme.rotate == "hadamard" and head_dim & (head_dim - 1):
        raise InputError(
            "q",
            got=f"head_dim {head_dim}",
            expected="a power of 2, to be rotated",
            hint='leave such heads unrotated: rotate="none"',
        )


def check_tensors(q: Any, k: Any, v: Any, layout: Dense | Packed | Paged, encoded: bool = False) -> None:
    """Types, rank, dtype, device and memory of q, k and v, or of q alone where `check_encoded` has seen the others."""
    paged = isinstance(layout, Paged)
    packed = not isinstance(layout, Dense) and layout.cu_seqlens_q is not None
    for name, x in (("q", q),) if encoded else (("q", q), ("k", k), ("v", v)):
        shape = "(total, heads, dim)" if packed else "(batch, seqlen, heads, dim)"
        if paged and name != "q":
            shape = "(num_pages, page_size, heads, dim)"
        rank = shape.count(",") + 1
        check_dense(name, x, f"a dense tensor {shape}")
        if x.ndim != rank:
            hint = (
                "packed sequences need layout=tilewise.Packed(cu_seqlens)"
                if x.ndim == 3
                else "dense layout; see `layout=`"
            )
            if rank == 3:
                hint = "the packed layout has no batch dimension: x.flatten(0, 1)"
            if paged:
                hint = "a pool of pages for k and v; q is packed with cu_seqlens_q; see `tilewise.Paged`"
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
            hint="convert it, for example with .to(torch.bfloat16)",
        )


def check_shapes(
    q: torch.Tensor, k: torch.Tensor | Encoded | ByChannel, v: torch.Tensor | Encoded, layout: Dense | Packed | Paged
) -> None:
    """Shapes that fit each other."""
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
    if isinstance(layout, Dense) and q.shape[0] != k.shape[0]:
        raise InputError(
            "k",
            got=f"batch {k.shape[0]}",
            expected=f"{q.shape[0]}, the batch of q",
            hint="expand it: k.expand(batch, -1, -1, -1) copies nothing",
        )
    if isinstance(layout, Paged) and k.shape[1] == 0:
        raise InputError("k", got="pages of 0 tokens", expected="1 or more", hint="(num_pages, page_size, heads, dim)")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv or heads_q == 0:
        raise InputError(
            "k",
            got=f"{heads_kv} heads",
            expected=f"a divisor of the {heads_q} query heads",
            hint="each key/value head serves num_heads_q / num_heads_kv query heads",
        )
    for name, dim in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if not 1 <= dim <= 512:
            raise InputError(
                name,
                got=f"head_dim {dim}",
                expected="1 to 512",
                hint="split wide heads into several",
            )
        if heads_q * dim >= 2**24:  # a tile's rows are reached with 32 bits
            raise InputError(
                name,
                got=f"{heads_q} query heads of {dim}",
                expected="fewer than 2**24 elements per token",
                hint="call it for some of the heads at a time",
            )


def seen_by_pytorch(
    q: Any, k: Any, v: Any, sink: Any, captured: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[bool, bool]:
    """Whether PyTorch records or transforms a call of these, and whether what formulas capture can be read; raises
    InputError for the first that is no dense tensor with memory of its own.
    """
    named = {"q": q, "k": k, "v": v, "sink": sink, **{f"captured tensor {n}": x for n, x in enumerate(captured)}}
    others = [x for x in tensors if all(x is not y for y in named.values())]
    named |= {f"a tensor of layout, codes or seed ({n})": x for n, x in enumerate(others)}
    check_all_dense({name: x for name, x in named.items() if isinstance(x, torch.Tensor)})
    kept = recorded(tensors)
    return kept or transformed(tensors), not kept and not transformed(captured)


def check_sink(sink: Any, q: torch.Tensor) -> None:
    """One floating-point logit per query head."""
    expected = f"a floating-point tensor ({q.shape[-2]},) on {q.device}: one logit per query head"
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


def check_captured(bound: Bound, what: str, q: torch.Tensor) -> None:
    """Types and device of the tensors that a formula captures."""
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


def scale_of(scale: Any, head_dim: int) -> float:
    """The factor of q k^T."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise InputError(
            "scale",
            got="a tensor that takes a gradient",
            expected="a number",
            hint="multiply q by it, or write score=lambda s, b, h, i, j: s * scale",
        )
    number = isinstance(scale, (numbers.Real, torch.Tensor, torch.SymInt, torch.SymFloat))
    try:
        value = float(scale) if number and not isinstance(scale, bool) else math.nan
    except (
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ):  # a tensor of several elements, an integer beyond floats
        value = math.nan
    if not -math.inf < value < math.inf:  # nor NaN; not math.isfinite, which torch.compile cannot trace
        raise InputError("scale", got=shown(scale), expected="a finite number", hint="the default is head_dim ** -0.5")
    return value


def dropout_of(dropout: Any) -> float:
    """The probability of dropping a weight."""
    number = isinstance(dropout, (int, float, numbers.Real))  # False too: `self.training and 0.1`
    if not number or not 0.0 <= dropout < 1.0:
        raise InputError(
            "dropout", got=shown(dropout), expected="a probability in [0, 1)", hint="0.0 turns it off, as in evaluation"
        )
    return float(dropout)


def seed_of(seed: Any, device: torch.device, dropout: float) -> torch.Tensor | None:
    """A seed on the device: drawn from PyTorch's generator (advances under CUDA graph replay), or the caller's."""
    if seed is not None:
        _check_seed(seed, device)
    if not dropout:
        return None
    if seed is None:
        return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        return seed.reshape(1)
    return torch.full((1,), seed if isinstance(seed, int) else int(seed), dtype=torch.int64, device=device)


def _check_seed(seed: Any, device: torch.device) -> None:
    if isinstance(seed, torch.Tensor):
        good = seed.numel() == 1 and seed.dtype == torch.int64 and seed.device == device
    else:
        whole = isinstance(seed, (int, numbers.Integral)) and not isinstance(seed, bool)
        good = whole and 0 <= int(seed) < 2**63
    if not good:
        raise InputError(
            "seed",
            got=shown(seed),
            expected=f"an integer in [0, 2**63) or an int64 tensor of one element on {device}",
            hint="None draws one from PyTorch's generator",
        )
