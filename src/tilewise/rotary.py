"""Rotary position embedding: tables of angles, and where on them each token stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.core.readback import host_range, unreadable, values_checked
from tilewise.core.tensors import check_dense, hidden

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TABLE = "a floating-point tensor (num_positions, rotary_dim / 2) with unit stride in the last dimension"


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding of some tokens: tables of cosines and sines, and the position of each token.

    Of the first rotary_dim dimensions of every head, pair n of a token at position p is rotated by the angle with
    cosine cos[p, n] and sine sin[p, n]; the other dimensions stay. Computed in float32, each product rounded before the
    sum, and rounded once more to the dtype of the result: every implementation has the same bits.

    Args:
        cos, sin: (num_positions, rotary_dim / 2), floating point, any stride between positions: both may be halves of
            one table. `tilewise.rope_tables` makes both.
        positions: int32 or int64 (tokens,), contiguous, on the device of cos and sin: the row of each token.
        interleaved: if True, a pair is dimensions 2 n and 2 n + 1 (GPT-J), else n and n + rotary_dim / 2 (GPT-NeoX,
            Llama).

    Raises:
        InputError: another dtype or shape, or tensors that do not fit each other.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Example:
        >>> rope = tw.Rope(*tw.rope_tables(16, 100), positions=torch.arange(100))
        >>> rotated = tw.rope(q[0], rope=rope)
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name, x in (("Rope cos", self.cos), ("Rope sin", self.sin)):
            check_dense(name, x, _TABLE, "row p has position p")
            if x.dtype not in _FLOATS or x.ndim != 2 or x.shape[1] < 1 or (x.stride(1) != 1 and x.shape[1] > 1):
                raise InputError(
                    name,
                    got=f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}",
                    expected=_TABLE,
                    hint="one column for each pair; of repeated angles pass half, [:, : rotary_dim // 2]",
                )
        cos, sin, positions = self.cos, self.sin, self.positions
        if sin.shape != cos.shape or sin.dtype != cos.dtype or sin.device != cos.device:
            raise InputError(
                "Rope sin",
                got=f"{sin.dtype} {tuple(sin.shape)} on {sin.device}",
                expected=f"{cos.dtype} {tuple(cos.shape)} on {cos.device}, as cos",
                hint="compute both from the same angles",
            )
        expected = f"a contiguous int32 or int64 tensor (tokens,) on {cos.device}"
        check_dense("Rope positions", positions, expected, "torch.arange(...)")
        fits = positions.ndim == 1 and positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous()
        if not fits or positions.device != cos.device:
            raise InputError(
                "Rope positions",
                got=f"{positions.dtype} {tuple(positions.shape)} on {positions.device}, strides {positions.stride()}",
                expected=expected,
                hint="tokens of a batch lie one after another: use .flatten(), .to() and .contiguous()",
            )
        check_flags(**{"Rope interleaved": self.interleaved})

    @property
    def rotary_dim(self) -> int:
        """How many dimensions are turned."""
        return 2 * self.cos.shape[1]


def check_rope(rope: Any, name: str, x: torch.Tensor) -> None:
    """Raise InputError unless it is a Rope for x (tokens, heads, head_dim), or (batch, seqlen, heads, head_dim), which
    is argument `name`.
    """
    if not isinstance(rope, Rope):
        raise InputError(
            "rope", got=type(rope).__name__, expected="None or a tilewise.Rope", hint="Rope(cos, sin, ...)"
        )
    tokens = x.shape[:-2].numel()
    if rope.positions.shape[0] != tokens:
        raise InputError(
            "rope",
            got=f"{rope.positions.shape[0]} positions",
            expected=f"{tokens}, one for each token of {name}",
            hint="positions of several sequences lie one after another, as their tokens do",
        )
    if rope.rotary_dim > x.shape[-1]:
        raise InputError(
            "rope",
            got=f"rotary_dim {rope.rotary_dim}",
            expected=f"at most {x.shape[-1]}, the head_dim of {name}",
            hint="cos and sin have a column for each pair, not for each dimension",
        )
    if rope.cos.device != x.device:
        raise InputError(
            "rope", got=f"on {rope.cos.device}", expected=f"{x.device}, as {name}", hint="move its tensors"
        )


def check_angles(rope: Rope) -> None:
    """Raise InputError unless angles are constants, and, where values are checked, the tables have every position."""
    for name, x in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                name,
                got="a tensor that takes a gradient",
                expected="none: angles are constants",
                hint="pass it after .detach()",
            )
    if values_checked(rope.cos.device) and not hidden(rope.positions):
        check_positions(rope)


def check_positions(rope: Rope, slots: torch.Tensor | None = None) -> None:
    """Raise InputError unless the tables have every position, with `slots` of the tokens whose slot is not negative;
    reads values, unless that is impossible now.
    """
    rows, ends = rope.cos.shape[0], host_range(rope.positions)
    if ends is None or (ends[0] >= 0 and ends[1] < rows) or (slots is not None and unreadable(slots)):
        return
    positions = rope.positions if slots is None else rope.positions[slots >= 0]
    wrong = positions[(positions < 0) | (positions >= rows)]
    if wrong.numel():
        raise InputError(
            "rope",
            got=f"position {int(wrong[0])}",
            expected=f"0 to {rows - 1}, the rows of cos and sin",
            hint="make the tables as long as the longest sequence",
        )


def rotated(x: torch.Tensor, rope: Rope, back: bool = False) -> torch.Tensor:
    """x (tokens, heads, head_dim), turned, or turned back, not rounded yet: in float32, of float64 in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.index_select(0, rope.positions).to(wide)[:, None] for table in (rope.cos, rope.sin))
    less, more = (sin, -sin) if back else (-sin, sin)
    half, turned = rope.rotary_dim // 2, rope.rotary_dim
    paired, axis = ((half, 2), -1) if rope.interleaved else ((2, half), -2)
    pairs = x[..., :turned].to(wide).reshape(*x.shape[:-1], *paired)
    # of a pair (a, b): (a cos, b cos) + (b (-sin), a sin), whose bits are those of a cos - b sin and b cos + a sin
    found = (pairs * torch.stack((cos, cos), axis)).add_(pairs.flip(axis).mul_(torch.stack((less, more), axis)))
    found = found.flatten(-2)
    return found if turned == x.shape[-1] else torch.cat((found, x[..., turned:].to(wide)), -1)
