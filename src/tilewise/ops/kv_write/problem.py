"""The facts of one call of `kv_write` or `copy_pages`, checked before any work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.overlap import check_apart
from tilewise.core.readback import unreadable, values_checked
from tilewise.core.tensors import check_all_dense, check_dense, refuse_transforms
from tilewise.quant import ByChannel, Encoded
from tilewise.rotary import Rope, check_positions, check_rope

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDEX = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Write:
    """Tokens k (tokens, heads, head_dim) and v that go to slots of the pages. Implementations read nothing else.

    With `scales` of both (num_pages, page_size, heads), pages hold codes, whose kind their dtype says (`Encoded`). Keys
    by channel are all in `channels`, of which k_pages and the first scale are parts. Keys are turned by `rope` before
    they are rounded or encoded.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slots: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    rope: Rope | None = None
    channels: ByChannel | None = None

    @property
    def changed(self) -> tuple[torch.Tensor, ...]:
        """What is written to."""
        more = () if self.channels is None else (self.channels.least, self.channels.open)
        return (self.k_pages, self.v_pages, *(self.scales or ()), *more)


@dataclass(frozen=True, eq=False, slots=True)
class Copy:
    """Pairs (n, 2) of a page and the page that becomes its copy."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    pairs: torch.Tensor

    @property
    def changed(self) -> tuple[torch.Tensor, ...]:
        """What is written to."""
        return (self.k_pages, self.v_pages)


Call = Write | Copy


def write_call(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, rope: Any = None) -> Write:
    """The call of `kv_write`; raises InputError."""
    encoded = _check_pages(k_pages, v_pages)
    for name, x, pages in (("k", k, k_pages), ("v", v, v_pages)):
        _check_tensor(name, x, 3, "(tokens, num_heads_kv, head_dim)")
        if x.shape[1:] != pages.shape[2:]:
            raise InputError(
                name,
                got=f"shape {tuple(x.shape)}",
                expected=f"(tokens, {pages.shape[2]}, {pages.shape[3]}), as {name}_pages {tuple(pages.shape)}",
                hint="tokens of a batch lie one after another: flatten (batch, seqlen, heads, dim) with .flatten(0, 1)",
            )
        if not encoded:
            _check_alike(name, x, f"{name}_pages", pages)
        elif x.device != pages.device:
            raise InputError(
                name, got=f"device {x.device}", expected=f"{pages.device}, as {name}_pages", hint="move it there"
            )
    _check_alike("v", v, "k", k)
    if v.shape[0] != k.shape[0]:
        raise InputError(
            "v", got=f"{v.shape[0]} tokens", expected=f"{k.shape[0]}, as k has", hint="one row for each token"
        )
    _check_index("slot_mapping", slots, (k.shape[0],), "(tokens,)", k.device)
    if rope is not None:
        check_rope(rope, "k", k)
        check_all_dense({"rope.cos": rope.cos, "rope.sin": rope.sin, "rope.positions": rope.positions})
        _check_no_gradient(cos=rope.cos, sin=rope.sin)
    _check_no_gradient(k=k, v=v, **({} if encoded else {"k_pages": k_pages, "v_pages": v_pages}))
    if isinstance(k_pages, ByChannel):
        _check_alike("k", k, "k_pages.open", k_pages.open)
    call = write_of(k, v, k_pages, v_pages, slots, rope)
    check_values(call)
    return call


def write_of(
    k: torch.Tensor, v: torch.Tensor, k_pages: Any, v_pages: Any, slots: torch.Tensor, rope: Rope | None
) -> Write:
    """The call of arguments that fit, but for pages that overlap."""
    if isinstance(k_pages, torch.Tensor):
        call = Write(k, v, k_pages, v_pages, slots, None, rope)
    else:
        channels = k_pages if isinstance(k_pages, ByChannel) else None
        call = Write(k, v, k_pages.data, v_pages.data, slots, (k_pages.scale, v_pages.scale), rope, channels)
    check_apart("v_pages", call.v_pages, "k_pages", call.k_pages)
    return call


def copy_calls(k_pages: Any, v_pages: Any, pairs: Any) -> tuple[Copy, ...]:
    """The call of `copy_pages`, of encoded pages one for codes, as bytes, and one for scales; raises InputError."""
    if isinstance(k_pages, ByChannel):
        raise InputError(
            "k_pages",
            got="a ByChannel",
            expected="tensors, or an Encoded",
            hint="`tilewise.kv.PagePool.copy` and `open` copy such pages",
        )
    encoded = _check_pages(k_pages, v_pages)
    _check_index("pairs", pairs, (None, 2), "(n, 2)", k_pages.device)
    if encoded:
        codes = Copy(k_pages.data.view(torch.uint8), v_pages.data.view(torch.uint8), pairs)
        calls: tuple[Copy, ...] = (codes, Copy(k_pages.scale[..., None], v_pages.scale[..., None], pairs))
    else:
        _check_no_gradient(k_pages=k_pages, v_pages=v_pages)
        calls = (Copy(k_pages, v_pages, pairs),)
    check_values(calls[0])
    return calls


def check_values(call: Call) -> None:
    """The checks that need values, where these are checked, and unless they cannot be read now."""
    if not values_checked(call.k_pages.device):
        return
    num_pages, page_size = call.k_pages.shape[:2]
    if isinstance(call, Write):
        largest, again = (-1, None) if unreadable(call.slots) else _slots(call.slots)
        if largest >= num_pages * page_size:
            raise InputError(
                "slot_mapping",
                got=f"slot {largest}",
                expected=f"below {num_pages * page_size}: {num_pages} pages of {page_size}",
                hint="a slot is page * page_size + offset; a negative one skips its token",
            )
        if again is not None:
            raise InputError(
                "slot_mapping", got=f"slot {again} twice", expected="every slot once", hint="give -1 to all but one"
            )
        if call.rope is not None:
            check_positions(call.rope, call.slots)
        if call.channels is not None:
            _check_open(call.channels, call.slots)
        return
    largest, again = (-1, None) if unreadable(call.pairs) else _pairs(call.pairs)
    if largest >= num_pages:
        raise InputError(
            "pairs", got=f"page {largest}", expected=f"below {num_pages}, the pages", hint="a negative page skips"
        )
    if again is not None:
        raise InputError(
            "pairs",
            got=f"page {again} written, and in another pair",
            expected="pages that are written in one pair only",
            hint="make one call after another where a page is copied on",
        )


def _check_open(channels: ByChannel, slots: torch.Tensor) -> None:
    """Raise InputError for a token whose page is not open, and is not filled by the tokens around it."""
    if unreadable(slots):
        return
    channels.check_places()
    page_size = channels.data.shape[1]
    page, offset = slots // page_size, slots % page_size
    coded = (slots >= 0) & (channels.place[page.clamp(min=0)] < 0)
    first = torch.arange(len(slots), device=slots.device) - offset  # where the page's first token would be
    last = first + page_size - 1
    filled = (last < len(slots)) & (slots[last.clamp(max=len(slots) - 1)] == slots - offset + page_size - 1)
    if not channels.open.shape[0]:  # nor has any page been open
        filled &= (first >= 0) & (slots[first.clamp(min=0)] == slots - offset)
    lost = slots[coded & ~filled].tolist()
    if lost:
        raise InputError(
            "slot_mapping",
            got=f"slot {lost[0]}, in a page of codes that this call does not fill",
            expected="slots of open pages, or consecutive slots up to the end of a page",
            hint="`k_pages.place` says which pages are open; `tilewise.kv.KVCache` opens them",
        )


def _slots(slots: torch.Tensor) -> tuple[int, int | None]:
    """The largest slot, and one that comes twice."""
    values = sorted(slot for slot in slots.tolist() if slot >= 0)
    again = next((a for a, b in itertools.pairwise(values) if a == b), None)
    return values[-1] if values else -1, again


def _pairs(pairs: torch.Tensor) -> tuple[int, int | None]:
    """The largest page, and one that is written in one pair and read or written in another, or read in its own."""
    values = [pair for pair in pairs.tolist() if min(pair) >= 0]
    read, written = {source for source, _ in values}, set()
    again = None
    for _, target in values:
        if target in read or target in written:
            again = target
        written.add(target)
    return max((max(pair) for pair in values), default=-1), again


def _check_pages(k_pages: Any, v_pages: Any) -> bool:
    """Whether they are encoded."""
    by_channel = isinstance(k_pages, ByChannel)
    encoded = by_channel or isinstance(k_pages, Encoded) or isinstance(v_pages, Encoded)
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if encoded and not (by_channel and name == "k_pages"):
            _check_encoded(name, x)
        elif encoded:
            check_all_dense(
                {f"k_pages.{part}": getattr(x, part) for part in ("data", "scale", "least", "open", "place")}
            )
        else:
            _check_tensor(name, x, 4, _PAGES)
        if not x.shape[1]:
            raise InputError(name, got="pages of 0 tokens", expected="1 or more", hint="see `tilewise.Paged`")
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise InputError(
            "v_pages",
            got=f"shape {tuple(v_pages.shape)}",
            expected=f"{(*k_pages.shape[:3], 'head_dim_v')}, as k_pages has pages, tokens and heads",
            hint="keys and values of a token lie at the same slot",
        )
    if not encoded:
        _check_alike("v_pages", v_pages, "k_pages", k_pages)
    elif v_pages.device != k_pages.device or (not by_channel and v_pages.kind != k_pages.kind):
        kind = v_pages.kind if by_channel else k_pages.kind
        raise InputError(
            "v_pages",
            got=f"{v_pages.kind} on {v_pages.device}",
            expected=f"{kind} on {k_pages.device}, as k_pages",
            hint="encode both alike",
        )
    return encoded


_PAGES = "(num_pages, page_size, num_heads_kv, head_dim)"


def _check_encoded(name: str, x: Any) -> None:
    if isinstance(x, Encoded):
        check_all_dense({f"{name}.data": x.data, f"{name}.scale": x.scale})
        refuse_transforms(name, (x.data, x.scale))
    if not isinstance(x, Encoded):
        raise InputError(
            name, got=type(x).__name__, expected=f"an Encoded {_PAGES}, as the other", hint="encode both or none"
        )
    if len(x.shape) != 4:
        raise InputError(name, got=f"an Encoded of shape {x.shape}", expected=_PAGES, hint="see `tilewise.Paged`")


def _check_tensor(name: str, x: Any, ndim: int, shape: str) -> None:
    """Type, rank, dtype and memory of keys, values or pages."""
    check_dense(name, x, f"a dense tensor {shape}", "pass keys and values of all heads")
    refuse_transforms(name, (x,))
    if x.ndim != ndim or x.shape[-1] < 1:
        raise InputError(name, got=f"shape {tuple(x.shape)}", expected=shape, hint="heads come before their dimension")
    if x.dtype not in DTYPES:
        raise InputError(name, got=str(x.dtype), expected="float16, bfloat16 or float32", hint="convert it with .to()")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise InputError(
            name,
            got=f"strides {x.stride()}",
            expected="unit stride in the last dimension",
            hint="transpose heads and tokens of contiguous rows, or call .contiguous() on k and v",
        )


def _check_alike(name: str, x: torch.Tensor, other: str, y: torch.Tensor) -> None:
    if x.dtype != y.dtype or x.device != y.device:
        raise InputError(
            name,
            got=f"{x.dtype} on {x.device}",
            expected=f"{y.dtype} on {y.device}, as {other}",
            hint=f"use {name}.to({other})",
        )


def _check_index(name: str, x: Any, shape: tuple[int | None, ...], says: str, device: torch.device) -> None:
    expected = f"a contiguous int32 or int64 tensor {says} on {device}"
    check_dense(name, x, expected, "torch.tensor(..., dtype=torch.int64)")
    refuse_transforms(name, (x,))
    fits = x.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
    if not fits:
        raise InputError(name, got=f"shape {tuple(x.shape)}", expected=f"{expected}: {shape}", hint="one row for each")
    if x.dtype not in _INDEX or x.device != device or not x.is_contiguous():
        raise InputError(
            name,
            got=f"{x.dtype} on {x.device}, strides {x.stride()}",
            expected=expected,
            hint="use .to() and .contiguous()",
        )


def _check_no_gradient(**tensors: torch.Tensor) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x.requires_grad:
            raise InputError(
                name,
                got="a tensor that takes a gradient",
                expected="none: what is written into a cache is not differentiated",
                hint=f"call it under torch.no_grad(), or pass {name}.detach()",
            )
