"""The facts of one attention call, validated once (see `arguments` for the checks)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.core.readback import being_traced, host_values, values_checked
from tilewise.core.tensors import plain, refuse_batched
from tilewise.formula.check import to_be_proved
from tilewise.formula.formula import Mask, as_mask, as_score
from tilewise.formula.sizes import Size, Sizes, check_lengths, check_sizes, of_lengths
from tilewise.formula.structure import Bound
from tilewise.layout_checks import check_bounds, check_packing, check_pages, tables_of
from tilewise.layouts import Dense, LengthBounds, Packed, Paged, Pages
from tilewise.ops.attention.arguments import (
    check_captured,
    check_codes,
    check_encodable,
    check_encoded,
    check_shapes,
    check_sink,
    check_tensors,
    dropout_of,
    layout_of,
    scale_of,
    seed_of,
    seen_by_pytorch,
)
from tilewise.ops.attention.lengths import check_indices, lengths_now
from tilewise.quant import KINDS, ByChannel, Encoded
from tilewise.quant.blocks import Quantized
from tilewise.quant.codes import decoded
from tilewise.quant.schemes import Scheme, check_scheme

NO_BOUNDS = LengthBounds()


class Signature:
    """Sizes, strides and types of a call's tensors and the structure of its formula.

    Equal ones are one object, so that whatever is remembered for a kind of call is found without hashing these parts.
    """


@dataclass(eq=False, slots=True)  # not frozen: that would triple the time it takes to make one
class Call:
    """One call of attention: its tensors, its formula and its sizes. Implementations read this and nothing else.

    q, k, v are (batch, seqlen, heads, dim), or (total, heads, dim) with `cu_seqlens_q` and `cu_seqlens_k` when packed.
    With `pages`, k and v are (num_pages, page_size, heads, dim), and q is packed where there is `cu_seqlens_q`. With
    `scales` of k and v (num_pages, page_size, heads), k and v are codes, whose kind their dtype says (`Encoded`). Where
    k has scales by channel instead, three more tensors follow both scales: `least`, `open` and `place` (`ByChannel`).
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
    pages: Pages | None = None
    batch_invariant: bool = False  # whether other requests must not change the bits of one
    first_batch: int = 0  # what `b` is for the first batch element (one sequence taken out of a packed call)
    scales: tuple[torch.Tensor, ...] | None = None
    share_prefixes: bool = False  # whether keys that requests have in common may be read once
    scheme: Scheme | None = None  # the codes that q, k and v are to become
    codes: Quantized | None = None  # or have become already
    bounds: LengthBounds = NO_BOUNDS  # what is declared of the lengths of sequences
    skip: torch.Tensor | None = None  # by head: scores of a tile all so far below their rows' largest count for nothing

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that may take a gradient."""
        captured = () if self.score is None else self.score.tensors
        masking = () if self.mask is None else self.mask.tensors
        sink = () if self.sink is None else (self.sink,)
        return (self.q, self.k, self.v, *sink, *captured, *masking, *(self.scales or ()))

    @property
    def packed(self) -> bool:
        """Whether q is packed."""
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
        """seqlen_k, the total of all sequences, or the most that one request's pages hold."""
        return self.k.shape[-3] if self.pages is None else self.pages.longest * self.k.shape[1]

    @property
    def has_pairs(self) -> bool:
        """Whether sizes leave a query and a key to meet: the formulas of another call are neither proved nor read."""
        return bool(self.batch and self.rows_q and self.rows_k)

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
    def keys_by_channel(self) -> bool:
        """Whether k has codes by channel, and open pages."""
        return self.scales is not None and len(self.scales) > 2

    @property
    def head_dim_v(self) -> int:
        width = self.v.shape[-1]
        return width if self.scales is None or self.v.dtype != torch.uint8 else width * KINDS["int4"].in_byte

    def new_output(self) -> torch.Tensor:
        q, head_dim_v = self.q, self.head_dim_v
        if q.shape[-1] == head_dim_v:
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        return torch.empty(*q.shape[:-1], head_dim_v, dtype=q.dtype, device=q.device)

    def new_lse(self) -> torch.Tensor:
        q = self.q
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        *batch, rows, heads, _ = q.shape
        return torch.empty(*batch, heads, rows, dtype=dtype, device=q.device)


def rows_within_reach(*tensors: torch.Tensor) -> bool:
    """Whether rows (..., rows, heads, dim) lie so near each other that 32 bits count offsets in a tile of 128."""
    return all(x.shape[-3] < 2 or x.stride(-3) < 2**24 for x in tensors)


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
    batch_invariant: bool = False,
    quantize: Any = None,
) -> Call:
    """Check every argument of `attention` and collect them; raises InputError or FormulaError before any work."""
    layout = layout_of(layout)
    check_flags(deterministic=deterministic, batch_invariant=batch_invariant)
    codes = quantize if isinstance(quantize, Quantized) else None
    scheme = None if quantize is None else check_scheme(quantize if codes is None else codes.scheme, "quantize")
    mask = None if mask is None else as_mask(mask)
    score = None if score is None else as_score(score)
    bound_mask = None if mask is None else mask.bound
    bound_score = None if score is None else score.bound
    sizes = (() if mask is None else mask.sizes) + (() if score is None else score.sizes)
    pages = layout.pages if isinstance(layout, Paged) else None
    cu_seqlens_q = layout.cu_seqlens_q if isinstance(layout, (Packed, Paged)) else None
    cu_seqlens_k = layout.keys if isinstance(layout, Packed) else None
    given, scales = (k, v), None
    if isinstance(k, (Encoded, ByChannel)) or isinstance(v, (Encoded, ByChannel)):
        check_encoded(q, k, v, layout)
        k, v, scales = codes_and_scales(k, v)
    captured = (*(bound_mask.tensors if bound_mask else ()), *(bound_score.tensors if bound_score else ()))
    tensors = (q, k, v, sink, seed, *captured, cu_seqlens_q, cu_seqlens_k, *(pages or ()), *(scales or ()))
    aside, readable = False, True  # whether PyTorch records or transforms the call
    if not plain(tensors):
        aside, readable = seen_by_pytorch(q, k, v, sink, captured, [x for x in tensors if isinstance(x, torch.Tensor)])
    packed = cu_seqlens_q is not None
    signature = None if aside else signature_of(q, k, v, bound_mask, bound_score, packed, pages, scales)
    unproved = readable and (to_be_proved(bound_mask) or to_be_proved(bound_score))
    numbers = (bound_mask and bound_mask.numbers, bound_score and bound_score.numbers) if unproved else None
    bounds = NO_BOUNDS if isinstance(layout, Dense) else layout.bounds
    key = (signature, numbers, cu_seqlens_q.shape if isinstance(cu_seqlens_q, torch.Tensor) else None, bounds, sizes)
    checked = signature is not None and key in _checked
    if not checked:
        check_tensors(q, k, v, layout, scales is not None)
        check_shapes(q, *given, layout)
        for what, bound in (("mask", bound_mask), ("score", bound_score)):
            if bound is not None:
                check_captured(bound, what, q)
    share_prefixes = isinstance(layout, Paged) and layout.share_prefixes
    if share_prefixes is not False:
        check_flags(share_prefixes=share_prefixes)
    if share_prefixes and batch_invariant:
        raise InputError(
            "batch_invariant",
            got="True, for tilewise.Paged(..., share_prefixes=True)",
            expected="one of the two, not both",
            hint="what requests share depends on the batch, and so do the bits of results",
        )
    if aside:
        refuse_batched("layout", (cu_seqlens_q, cu_seqlens_k, *(pages or ())))
    if isinstance(layout, Packed) and not q.is_meta:
        check_packing(cu_seqlens_q, cu_seqlens_k, q, k)
    if pages is not None:
        check_pages(pages, cu_seqlens_q, q, k)
    if isinstance(layout, (Packed, Paged)):
        check_bounds(layout)
    if scheme is not None and codes is None and scales is None:
        check_encodable(scheme, q, k, v)
    if codes is not None:
        check_codes(codes, q, k, v, (cu_seqlens_q, cu_seqlens_k))
    if sink is not None:
        check_sink(sink, q)
    dropout = dropout_of(dropout)
    grad = torch.is_grad_enabled()
    grad_sink = grad and sink is not None and sink.requires_grad
    grad_captured = () if bound_score is None else tuple(grad and t.requires_grad for t in bound_score.tensors)
    grad_scales = any(scale.requires_grad for scale in scales or ())
    call = Call(
        q,
        k,
        v,
        sink,
        bound_mask,
        bound_score,
        cu_seqlens_q,
        cu_seqlens_k,
        scale_of(scale, q.shape[-1]),
        dropout,
        seed_of(seed, q.device, dropout),
        deterministic,
        grad
        and (q.requires_grad or k.requires_grad or v.requires_grad or grad_sink or any(grad_captured) or grad_scales),
        grad_sink,
        grad_captured,
        signature,
        pages,
        batch_invariant,
        scales=scales,
        share_prefixes=share_prefixes,
        scheme=scheme,
        codes=codes,
        bounds=bounds,
    )
    for_all = not checked
    if not checked:
        for_all = not unproved or check_indices(call)
    if sizes:
        _check_sizes(call, sizes, checked)
    if for_all and signature is not None:
        if len(_checked) > 4096:
            _checked.clear()
        _checked.add(key)
    return call


_checked: set[Any] = set()  # signatures, numbers, batch sizes and bounds of calls whose tensors were found in order


def signature_of(
    q: Any, k: Any, v: Any, mask: Bound | None, score: Bound | None, packed: bool, pages: Pages | None = None,
    scales: tuple[torch.Tensor, ...] | None = None,
) -> Signature | None:  # fmt: skip
    """The signature of these arguments; None while compiling, or for what is no tensor."""
    tensors = isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    if being_traced() or not tensors or q.ndim != 4 - packed:
        return None
    if pages is not None and not isinstance(pages.table, torch.Tensor):
        return None
    if not k.ndim == v.ndim == (q.ndim if pages is None else 4):
        return None
    if q.is_nested or k.is_nested or v.is_nested:  # which have no shape
        return None
    parts: list[Any] = [packed, pages and (pages.table.shape, pages.table.stride(), pages.first is not None)]
    for x in (q, k, v):
        parts += (x.dtype, x.device, x.shape, x.stride())
    parts.append(len(scales or ()))
    for scale in scales or ():
        parts += (scale.dtype, scale.shape, scale.stride())
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


def _check_sizes(call: Call, sizes: tuple[Size, ...], checked: bool) -> None:
    """Raise InputError for a size that a formula was made for and the call does not have."""
    dense = not call.packed and call.pages is None
    if not checked:
        check_sizes(sizes, Sizes(call.batch, call.num_heads_q, call.rows_q, call.rows_k, dense))
    if not dense and of_lengths(sizes) and values_checked(call.q.device):
        check_lengths(sizes, lengths_now(call) or ())


def check_mask(call: Call, mask: Mask, what: str) -> None:
    """Raise InputError or FormulaError unless a mask beside the call's own is for such a call."""
    check_captured(mask.bound, what, call.q)
    if to_be_proved(mask.bound) and not being_traced():
        check_indices(replace(call, mask=mask.bound, score=None))
    _check_sizes(call, mask.sizes, False)


def check_values(call: Call) -> None:
    """The checks that need values: those that `make_call` could not do while a region was compiled."""
    if call.pages is not None:
        check_pages(call.pages, call.cu_seqlens_q, call.q, call.k)
    elif call.cu_seqlens_q is not None:
        check_packing(call.cu_seqlens_q, call.cu_seqlens_k, call.q, call.k)
    if to_be_proved(call.mask) or to_be_proved(call.score):
        check_indices(call)


def codes_and_scales(k: Encoded | ByChannel, v: Encoded) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """k, v and scales as a `Call` has them."""
    more = (k.least, k.open, k.place) if isinstance(k, ByChannel) else ()
    return k.data, v.data, (k.scale, v.scale, *more)


def requests(call: Call) -> Iterator[tuple[Call, slice]]:
    """One dense call of batch 1 for each request of a paged call, its keys gathered from the pages and decoded, and its
    rows of q (packed), or of the batch.
    """
    assert call.pages is not None
    page_size = call.k.shape[1]
    tables, seqlens = tables_of(call.pages, page_size), host_values(call.pages.seqlens)
    starts = None if call.cu_seqlens_q is None else host_values(call.cu_seqlens_q)
    assert tables is not None
    assert seqlens is not None
    for b, (table, length) in enumerate(zip(tables, seqlens, strict=True)):
        pages = table.long()
        if call.scales is None:
            k, v = call.k[pages], call.v[pages]
        else:
            k_scale, v_scale, *channels = call.scales
            by_channel = ByChannel(call.k, k_scale, *channels) if channels else None
            k = decoded(call.k[pages], k_scale[pages]) if by_channel is None else by_channel.keys(pages)
            v = decoded(call.v[pages], v_scale[pages])
        k, v = (x.flatten(0, 1)[None, :length] for x in (k, v))
        rows = slice(b, b + 1) if starts is None else slice(starts[b], starts[b + 1])
        q = call.q[rows] if starts is None else call.q[None, rows]
        yield replace(call, q=q, k=k, v=v, cu_seqlens_q=None, pages=None, first_batch=b, scales=None), rows


def sequences(call: Call) -> Sequence[tuple[int, slice, slice]]:
    """(batch index, rows of q, rows of k) of each sequence of a packed call, on the host."""
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return [
        (b, slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])) for b in range(len(starts_q) - 1)
    ]
