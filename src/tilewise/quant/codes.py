"""Codes of 8 or 4 bits for keys and values, each row (a token's head) with a scale of its own.

Symmetric and dynamic: a row's scale is its largest absolute value over the largest code. Since it does not vary along
the row, attention applies it to a column of scores or of weights, and multiplies the codes as they are (Liu et al.,
"KIVI", 2024, scales values so, by token, and keys by channel instead).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.tensors import check_dense


class Kind(NamedTuple):
    """How a kind of code is held, its largest value, and how many a byte has."""

    dtype: torch.dtype
    largest: int
    in_byte: int


KINDS = {
    "int8": Kind(torch.int8, 127, 1),
    "fp8": Kind(torch.float8_e4m3fn, 448, 1),
    "int4": Kind(torch.uint8, 7, 2),  # + 8; low bits are the first half of a row, high bits the second
}
BY_DTYPE = {kind.dtype: name for name, kind in KINDS.items()}
SMALLEST = torch.finfo(torch.float32).tiny  # a scale; rows that need a smaller one are 0


@dataclass(frozen=True, eq=False)
class Encoded:
    """Quantized rows and their scales: a row stands for data * scale, a product in float32.

    `tilewise.attention` takes a pair as k and v with `layout=tilewise.Paged(...)`, and `tilewise.kv_write` and
    `tilewise.copy_pages` as pages; rows are then (num_pages, page_size, num_heads_kv).

    Args:
        data: (*rows, head_dim) int8 from -127 to 127 ("int8") or float8_e4m3fn, finite ("fp8"); or (*rows, head_dim /
            2) uint8 ("int4"), where byte n has number n + 8 in its low bits and number n + head_dim / 2 + 8 in its high
            bits, both from -7 to 7. Unit stride in the last dimension, any others.
        scale: (*rows,) float32, on the device of data, of any strides; 0 for a row of zeros, NaN for one that held NaN
            or an infinity.

    Raises:
        InputError: another dtype or shape, or tensors that do not fit each other.

    Example:
        >>> encoded = tw.quant.encode(k, "int4")
        >>> encoded.data.shape, encoded.scale.shape, encoded.shape
        (torch.Size([2, 100, 2, 8]), torch.Size([2, 100, 2]), (2, 100, 2, 16))
    """

    data: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        data, scale = self.data, self.scale
        for name, x in (("data", data), ("scale", scale)):
            check_dense(f"Encoded {name}", x, "a dense tensor", "`tilewise.quant.encode` has both")
        if data.dtype not in BY_DTYPE:
            raise InputError(
                "Encoded data",
                got=str(data.dtype),
                expected="int8, float8_e4m3fn or uint8 (two numbers of 4 bits)",
                hint="the type says which kind of code it is; `tilewise.quant.encode` makes all three",
            )
        if data.ndim < 1 or data.shape[-1] < 1 or (data.stride(-1) != 1 and data.shape[-1] > 1):
            raise InputError(
                "Encoded data",
                got=f"shape {tuple(data.shape)}, strides {data.stride()}",
                expected="(..., head_dim), or half of it for int4, with unit stride in the last dimension",
                hint="call .contiguous()",
            )
        if scale.dtype != torch.float32 or scale.shape != data.shape[:-1] or scale.device != data.device:
            raise InputError(
                "Encoded scale",
                got=f"{scale.dtype} {tuple(scale.shape)} on {scale.device}",
                expected=f"torch.float32 {tuple(data.shape[:-1])} on {data.device}: one for each row of data",
                hint="a scale for each token and head; expand one that several share",
            )

    @property
    def kind(self) -> str:
        """The kind of codes: "int8", "fp8" or "int4"."""
        return BY_DTYPE[self.data.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is encoded: (*rows, head_dim)."""
        return (*self.data.shape[:-1], self.data.shape[-1] * KINDS[self.kind].in_byte)

    @property
    def device(self) -> torch.device:
        """Where data and scale are."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.nbytes + self.scale.nbytes


def kind_of(name: str, kind: Any) -> Kind:
    """The kind of this name; raises InputError for another, which argument `name` was."""
    if kind not in KINDS:
        raise InputError(name, got=shown(kind), expected=f"one of {', '.join(map(repr, KINDS))}", hint="or no encoding")
    return KINDS[kind]


def check_head_dim(name: str, head_dim: int, kind: str) -> None:
    """Raise InputError where a row's codes would end inside a byte."""
    if head_dim % KINDS[kind].in_byte:
        raise InputError(
            name, got=f"head_dim {head_dim}", expected=f"an even head_dim for {kind!r}", hint="a byte holds two numbers"
        )


def encode(x: torch.Tensor, kind: str) -> Encoded:
    """Quantize each row of x to the nearest codes, with a scale for each row, computed in float32.

    Args:
        x: (..., head_dim), any floating-point dtype. A row that holds NaN or an infinity gets the scale NaN: all of it
            is NaN when it is decoded.
        kind: "int8" (errors up to half a scale), "fp8" (e4m3: up to 1/16 of a value) or "int4" (half a scale, which is
            18 times that of int8).

    Returns:
        An `Encoded` of the shape of x.

    Raises:
        InputError: another kind, no floating-point tensor, or an odd head_dim for "int4".

    Example:
        >>> encoded = tw.quant.encode(k, "int8")
        >>> (tw.quant.decode(encoded) - k).abs().max() <= encoded.scale.max() / 2
        tensor(True)
    """
    found = kind_of("kind", kind)
    expected, hint = "a floating-point tensor (..., head_dim)", "keys or values"
    check_dense("x", x, expected, hint)
    if not x.is_floating_point() or x.ndim < 1 or x.shape[-1] < 1:
        raise InputError("x", got=f"{x.dtype} {tuple(x.shape)}", expected=expected, hint=hint)
    check_head_dim("x", x.shape[-1], kind)
    x = x.detach().float()
    largest = x.abs().amax(-1)
    scale = largest / largest.new_full((), found.largest)  # by a number CUDA multiplies by its rounded inverse
    scale = torch.where(scale < SMALLEST, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    codes = torch.where((scale > 0)[..., None], x / scale[..., None], 0.0)
    if kind == "fp8":
        return Encoded(codes.to(found.dtype), scale)
    codes = codes.round()
    if kind == "int8":
        return Encoded(codes.to(found.dtype), scale)
    low, high = (codes + 8.0).to(torch.uint8).chunk(2, -1)
    return Encoded(low | high << 4, scale)


def decode(encoded: Encoded) -> torch.Tensor:
    """The numbers that codes stand for: the product that every implementation computes with.

    Args:
        encoded: an `Encoded`.

    Returns:
        float32 (*rows, head_dim).

    Raises:
        InputError: something that is no `Encoded`.

    Example:
        >>> tw.quant.decode(tw.quant.encode(k, "fp8")).shape
        torch.Size([2, 100, 2, 16])
    """
    if not isinstance(encoded, Encoded):
        hint = "tilewise.quant.encode makes one"
        raise InputError("encoded", got=type(encoded).__name__, expected="a tilewise.quant.Encoded", hint=hint)
    return decoded(encoded.data, encoded.scale)


def decoded(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`decode` of the parts."""
    if data.dtype == torch.uint8:
        data = torch.cat([data & 15, data >> 4], -1).float() - 8.0
    return data.float() * scale[..., None]
