"""The facts of one call that encodes queries, keys or values, checked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.tensors import refuse_batched
from tilewise.layout_checks import check_packing
from tilewise.layouts import Dense, Packed, Paged, index_tensors
from tilewise.ops.attention.arguments import check_encodable, check_shapes, check_tensors, layout_of
from tilewise.quant.blocks import groups_of_block, num_slots, rows_of_block, sequences
from tilewise.quant.schemes import LARGEST, Scheme, check_scheme
from tilewise.rotary import Rope, check_angles, check_rope, rotated

Tensors = dict[str, torch.Tensor]
_OF_VALUES = "v_"  # before the names of their results, where they come along
NUMBERS = {"fp16": torch.float16, "bf16": torch.bfloat16}  # kinds that are no codes


@dataclass(eq=False, slots=True)
class Call:
    """One of q, k and v, which `side` says, to be encoded. Implementations read this and nothing else.

    x is (batch, seqlen, heads, dim), or (total, heads, dim) with `cu_seqlens`. `other` are means of keys (batch,
    num_heads_kv, dim), with which queries are multiplied. `kind` is "int8", "int4", "fp8", or for values "fp16" or
    "bf16"; `shared` who shares a scale, in a scheme's words; `largest` what the largest number of a group becomes;
    `sums` whether sums of blocks are wanted, too, of queries or keys that are not rotated, with no scale for a head.
    With `cos`, `sin` and `positions` rows are turned first, and rounded to their dtype (`Rope`). `values`, of (batch,
    seqlen, heads, dim_v) or (total, heads, dim_v), come along with keys that are looked at for their means, as a call
    of their own (`beside`), whose kernels run meanwhile. `apart` says that kernels of another call run between those
    that look at what spans a sequence and the others, `behind` that the kernel launched before has no memory that
    results of this one may take, and that who runs behind it need not wait for its end to begin.
    """

    x: torch.Tensor
    cu_seqlens: torch.Tensor | None
    other: torch.Tensor | None
    side: str
    kind: str
    shared: str
    largest: float
    smooth: bool
    rotate: bool
    sums: bool = False
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    interleaved: bool = False
    values: torch.Tensor | None = None
    values_kind: str = "fp8"
    values_shared: str = "channel"
    values_largest: float = 0.0
    values_smooth: bool = False
    apart: bool = False
    behind: bool = False

    @property
    def beside(self) -> Call | None:
        """The call of values that come along."""
        if self.values is None:
            return None
        how = (self.values_kind, self.values_shared, self.values_largest, self.values_smooth)
        return Call(self.values, self.cu_seqlens, None, "v", *how, False, apart=True, behind=True)

    def take_along(self, values: Call) -> None:
        """Have values of the same sequences encoded, too."""
        self.values, self.values_kind, self.values_shared = values.x, values.kind, values.shared
        self.values_largest, self.values_smooth = values.largest, values.smooth
        self.apart = True

    @property
    def batch(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def heads(self) -> int:
        return self.x.shape[-2]

    @property
    def dim(self) -> int:
        return self.x.shape[-1]

    @property
    def rotary_dim(self) -> int:
        """How many dimensions are turned."""
        return 0 if self.cos is None else 2 * self.cos.shape[1]

    @property
    def columns(self) -> bool:
        """Whether codes stand by channel, keys side by side: those of values."""
        return self.side == "v" and self.kind not in NUMBERS

    @property
    def spanned(self) -> bool:
        """Whether scales of channels span a sequence,"""
        return self.columns and self.shared != "block"

    @property
    def summed(self) -> bool:
        """means that are taken off,"""
        return self.smooth and self.side != "q"

    @property
    def of_head(self) -> bool:
        """or a scale of all queries or keys."""
        return self.shared == "head" and self.side != "v"

    @property
    def leaves_memory(self) -> bool:
        """Whether the kernel that makes the codes reads what is forgotten when this call returns."""
        return self.of_head or (self.summed and self.rotate)

    def slots(self, rows: int) -> int:
        """Blocks of so many rows that a sequence has, or slots of packed ones."""
        return num_slots(self.x.shape[-3], rows, None if self.cu_seqlens is None else self.batch)

    @property
    def lead(self) -> tuple[int, ...]:
        """(batch, heads, blocks), packed (heads, slots)."""
        slots = self.slots(rows_of_block(self.side))
        return (self.batch, self.heads, slots) if self.cu_seqlens is None else (self.heads, slots)


def names(call: Call) -> list[str]:
    """Of the results: codes, and those of scale, mean, bias and sums that there are."""
    there = ["codes"]
    if call.kind not in NUMBERS:
        there.append("scale")
    if call.smooth:
        there.append("mean")
    if call.other is not None:
        there.append("bias")
    if call.sums:
        there += ["sum", "unit_sum"]
    if call.spanned:
        there.append("most")
    beside = call.beside
    return there if beside is None else there + [f"{_OF_VALUES}{name}" for name in names(beside)]


def of_values(results: Tensors) -> Tensors:
    """Those of values that come along, by the names of their own call."""
    return {name.removeprefix(_OF_VALUES): x for name, x in results.items() if name.startswith(_OF_VALUES)}


def alone(results: Tensors) -> Tensors:
    """The others."""
    return {name: x for name, x in results.items() if not name.startswith(_OF_VALUES)}


def results(call: Call) -> Tensors:
    """Empty ones, by name."""
    lead, device, beside = call.lead, call.x.device, call.beside
    own = [name for name in names(call) if not name.startswith(_OF_VALUES)]
    forms = {name: _form(call, lead, name) for name in own}
    made = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in forms.items()}
    return made if beside is None else made | {f"{_OF_VALUES}{name}": x for name, x in results(beside).items()}


def _form(call: Call, lead: tuple[int, ...], name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a result."""
    by_head = (call.batch, call.heads, call.dim)
    if name == "codes":
        dtype = NUMBERS.get(call.kind, torch.float8_e4m3fn if call.kind == "fp8" else torch.int8)
        blocks = lead[-1] * rows_of_block(call.side)
        return (*lead[:-1], call.dim, blocks) if call.columns else tuple(call.x.shape), dtype
    if name == "scale" and call.side == "v":
        return by_head if call.shared in ("channel", "head") else (*lead, 1), torch.float32
    if name == "scale":
        return (*lead, groups_of_block(call.side, call.shared)), torch.float32
    if name == "most":  # how large the values of a channel are at most
        return by_head, torch.float32
    if name == "mean":
        return ((*lead, call.dim), call.x.dtype) if call.side == "q" else (by_head, torch.float32)
    if name == "bias":
        return (*call.x.shape[:-3], call.heads, call.x.shape[-3]), torch.float32
    return (*lead, call.dim), torch.float32


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: codes have no gradient."""
    return {}


def given(call: Call) -> torch.Tensor:
    """x, turned where that is asked for: what becomes codes."""
    if call.cos is None:
        return call.x
    assert call.sin is not None
    assert call.positions is not None
    rope = Rope(call.cos, call.sin, call.positions, call.interleaved)
    return rotated(call.x.flatten(0, -3), rope).to(call.x.dtype).view(call.x.shape)


def parts(call: Call, results: Tensors) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, Tensors]]:
    """For each sequence its rows (seqlen, heads, dim), the means of keys (heads, dim) that its query heads meet, and
    where its results go: codes, bias, and scale and mean of its blocks or of all. Reads packed lengths on the host.
    """
    x, other = given(call), call.other
    if other is not None:
        other = other.repeat_interleave(call.heads // other.shape[1], 1)
    if call.cu_seqlens is None:
        for b in range(call.batch):
            yield x[b], None if other is None else other[b], {name: y[b] for name, y in results.items()}
        return
    step = rows_of_block(call.side)
    for b, rows, slots in sequences(call.cu_seqlens, call.side):
        where: dict[str, Any] = {
            "codes": (..., slice(slots.start * step, slots.stop * step)) if call.columns else rows,
            "scale": (slice(None), slots) if call.side != "v" or call.shared == "block" else b,
            "mean": (slice(None), slots) if call.side == "q" else b,
            "bias": (slice(None), rows),
            "most": b,
            "sum": (slice(None), slots),
            "unit_sum": (slice(None), slots),
        }
        found = {name: y[where[name]] for name, y in results.items()}
        yield x[rows], None if other is None else other[b], found


def make_call(
    side: str,
    x: torch.Tensor,
    scheme: Scheme,
    layout: Dense | Packed,
    other: torch.Tensor | None = None,
    sums: bool = False,
    rope: Rope | None = None,
) -> Call:
    """The call for one of the tensors that `check` has seen; `other` are the means of keys that queries meet."""
    cu_seqlens = None
    if isinstance(layout, Packed):
        cu_seqlens = layout.cu_seqlens_q if side == "q" else layout.keys
    smooth = side in scheme.smooth
    if side == "v":
        return Call(x, cu_seqlens, None, side, scheme.pv, scheme.v_scale, scheme.v_largest, smooth, False)
    shared = scheme.q_scale if side == "q" else scheme.k_scale
    rotate = scheme.rotate == "hadamard"
    turns = () if rope is None else (rope.cos, rope.sin, rope.positions, rope.interleaved)
    return Call(x, cu_seqlens, other, side, scheme.qk, shared, LARGEST[scheme.qk], smooth, rotate, sums, *turns)


def has_sums(scheme: Scheme) -> bool:
    """Whether encoding queries and keys may give sums of their blocks, too: in one pass, over rows as they were."""
    return scheme.rotate == "none" and "head" not in (scheme.q_scale, scheme.k_scale)


def check(q: Any, k: Any, v: Any, scheme: Any, layout: Any) -> tuple[Scheme, Dense | Packed]:
    """Scheme and layout, if all fits; raises InputError."""
    scheme, layout = check_scheme(scheme), layout_of(layout)
    assert not isinstance(layout, Paged)
    check_tensors(q, k, v, layout)
    check_shapes(q, k, v, layout)
    check_encodable(scheme, q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                name,
                got="a tensor that takes a gradient",
                expected="tensors that take none: codes have none",
                hint="call it inside torch.no_grad(), or pass .detach()ed tensors",
            )
    if isinstance(layout, Packed):
        refuse_batched("layout", index_tensors(layout))
        check_packing(layout.cu_seqlens_q, layout.keys, q, k)
    return scheme, layout


def check_ropes(rope: Any, q: torch.Tensor, k: torch.Tensor) -> dict[str, Rope]:
    """How queries ("q") and keys ("k") are turned, alike by one Rope or by a pair; raises InputError."""
    pair = rope if isinstance(rope, (tuple, list)) and len(rope) == 2 else (rope, rope)
    ropes = {side: one for side, one in zip("qk", pair, strict=True) if one is not None}
    for side, one in ropes.items():
        check_rope(one, side, q if side == "q" else k)
        check_angles(one)
    return ropes
