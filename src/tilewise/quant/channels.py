"""Codes of 4 or 2 bits for keys in pages, each channel of a head with a scale and a least number of its own in a page.

Channels of keys lie far from 0 and far apart, and stay there from token to token, so a channel's span over a page is
small where a token's is not (Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024).
A span is known when a page is full: until then the page is open, and its keys are kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.readback import host_range, values_checked
from tilewise.core.tensors import check_dense
from tilewise.quant.codes import SMALLEST

BITS = (4, 2)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class ByChannel:
    """Pages of keys quantized by channel: full pages as codes, where a key is least + code * scale, others as they are.

    `tilewise.attention` takes it as k with `layout=tilewise.Paged(...)`, and `tilewise.kv_write` as pages, both beside
    values that are an `Encoded`. A page is either open (keys as they are) or codes for all sequences that share it.
    `tilewise.kv.KVCache(keys_by_channel=...)` opens pages and closes them.

    Args:
        data: (num_pages, page_size, num_heads_kv, head_dim * bits / 8) uint8, where byte n has the numbers n, n +
            head_dim * bits / 8, and so on, the first in its lowest bits. Unit stride in the last dimension, any others.
        scale: (num_pages, num_heads_kv, head_dim), of the dtype of `open`; 0 for a channel whose keys are equal, NaN
            for one that held NaN or an infinity, of which all keys of the page are NaN. Unit stride as data.
        least: (num_pages, num_heads_kv, head_dim), likewise: the channel's least key.
        open: (num_open, page_size, num_heads_kv, head_dim) float16, bfloat16 or float32, keys as they are. Unit stride
            as data; its head_dim says how many bits codes have.
        place: int32 (num_pages,), contiguous: the row of `open` that has the page's keys; or, for a page of codes,
            -1 - row with the row that had its keys before it was full (any row, where it had none).

    Raises:
        InputError: another dtype or shape, or tensors that do not fit each other.

    Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024.

    Example:
        >>> pages = tw.quant.encode_by_channel(torch.randn(8, 16, 2, 16), bits=4)
        >>> pages.shape, pages.bits
        ((8, 16, 2, 16), 4)
    """

    data: torch.Tensor
    scale: torch.Tensor
    least: torch.Tensor
    open: torch.Tensor
    place: torch.Tensor

    def __post_init__(self) -> None:
        data, opened, place = self.data, self.open, self.place
        for name, x in (("data", data), ("scale", self.scale), ("least", self.least), ("open", opened)):
            _check_unit_stride(name, x)
        if data.dtype != torch.uint8 or data.ndim != 4 or data.shape[1] < 1:
            raise InputError(
                "ByChannel data",
                got=f"{data.dtype} {tuple(data.shape)}",
                expected="uint8 (num_pages, page_size, num_heads_kv, head_dim * bits / 8)",
                hint="`tilewise.quant.encode_by_channel` makes it",
            )
        widths = [data.shape[-1] * 8 // bits for bits in BITS]
        if opened.dtype not in DTYPES or opened.shape[1:-1] != data.shape[1:-1] or opened.shape[-1] not in widths:
            raise InputError(
                "ByChannel open",
                got=f"{opened.dtype} {tuple(opened.shape)}",
                expected=f"float16, bfloat16 or float32 (num_open, {data.shape[1]}, {data.shape[2]}, head_dim), with "
                f"head_dim {widths[0]} or {widths[1]}, for codes of 4 or 2 bits",
                hint="pages of the keys' own dtype, one for each that is not full; there may be none",
            )
        channels = (data.shape[0], data.shape[2], opened.shape[3])
        for name, x in (("scale", self.scale), ("least", self.least)):
            if x.dtype != opened.dtype or x.shape != channels or x.device != data.device:
                raise InputError(
                    f"ByChannel {name}",
                    got=f"{x.dtype} {tuple(x.shape)} on {x.device}",
                    expected=f"{opened.dtype} {channels} on {data.device}: one for each page, head and channel",
                    hint="of the dtype of `open`",
                )
        expected = f"contiguous int32 ({data.shape[0]},) on {data.device}, as open"
        hint = "the row of `open` for each page, below 0 for a page of codes"
        check_dense("ByChannel place", place, expected, hint)
        fits = place.dtype == torch.int32 and place.shape == data.shape[:1] and place.is_contiguous()
        if not fits or place.device != data.device or opened.device != data.device:
            got = f"{place.dtype} {tuple(place.shape)} on {place.device}"
            raise InputError("ByChannel place", got=got, expected=expected, hint=hint)

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 2."""
        return 8 * self.data.shape[-1] // self.open.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is encoded: (num_pages, page_size, num_heads_kv, head_dim)."""
        return (*self.data.shape[:-1], self.open.shape[-1])

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, least numbers and open pages."""
        return sum(x.nbytes for x in (self.data, self.scale, self.least, self.open, self.place))

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        """The keys of some pages, dequantized.

        Args:
            pages: int32 or int64 (n,): numbers of pages.

        Returns:
            float32 (n, page_size, num_heads_kv, head_dim).

        Raises:
            InputError: no such tensor, or, where values are checked, a page that does not exist.
        """
        expected, hint = "a dense int32 or int64 tensor (n,)", "torch.tensor([...])"
        check_dense("pages", pages, expected, hint)
        if pages.ndim != 1 or pages.dtype not in (torch.int32, torch.int64):
            raise InputError("pages", got=f"{pages.dtype} {tuple(pages.shape)}", expected=expected, hint=hint)
        found = host_range(pages) if values_checked(pages.device) and pages.numel() else None
        if found is not None and not 0 <= found[0] <= found[1] < self.data.shape[0]:
            got = f"page {found[0] if found[0] < 0 else found[1]}"
            raise InputError("pages", got=got, expected=f"0 to {self.data.shape[0] - 1}", hint="pages count from 0")
        data, scale, least, opened = (x[None] for x in (self.data, self.scale, self.least, self.open))
        return keys_of_pages(data, scale, least, opened, self.place, pages)[0]

    def check_places(self) -> None:
        """Raise InputError for a row that does not exist, where values are read."""
        found = host_range(self.place) if values_checked(self.device) and self.place.numel() else None
        if found is None:
            return
        (low, high), rows = found, self.open.shape[0]
        if high >= rows or low < -max(rows, 1):
            raise InputError(
                "k.place",
                got=f"row {high if high >= rows else -1 - low}",
                expected=f"below {rows}, the open pages, or -1 - such a row",
                hint="a page of codes has a number below 0",
            )


def encode_by_channel(x: torch.Tensor, bits: int) -> ByChannel:
    """Quantize full pages of keys by channel, with a scale and a minimum for each channel of a page.

    A channel's span over the page is divided into 2**bits - 1 steps, computed in float32; the step is then rounded to
    the dtype of x. Up to that rounding, errors are half a step at most. None of the pages is open.

    Args:
        x: keys (num_pages, page_size, num_heads_kv, head_dim), float16, bfloat16 or float32. Where a channel of a page
            holds NaN or an infinity, or its span exceeds float32, all of its keys in the page become NaN. Equal keys
            stay as they are.
        bits: 4 or 2.

    Returns:
        A `ByChannel`.

    Raises:
        InputError: other bits, no such tensor, or a head_dim whose codes would end inside a byte.

    Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024.

    Example:
        >>> x = torch.randn(8, 16, 2, 16)
        >>> keys = tw.quant.encode_by_channel(x, bits=4).keys(torch.arange(8))
        >>> (keys - x).abs().max() < 0.5
        tensor(True)
    """
    in_byte = 8 // check_bits("bits", bits)
    expected, hint = "float16, bfloat16 or float32 (num_pages, page_size, num_heads_kv, head_dim)", "keys of full pages"
    check_dense("x", x, expected, hint)
    if x.dtype not in DTYPES or x.ndim != 4 or not x.shape[1] * x.shape[3]:
        raise InputError("x", got=f"{x.dtype} {tuple(x.shape)}", expected=expected, hint=hint)
    check_channels("x", x.shape[-1], bits)
    keys = x.detach().float()
    low, span = keys.amin(1), keys.amax(1) - keys.amin(1)
    step = span / span.new_full((), 2**bits - 1)  # by a number CUDA multiplies by its rounded inverse
    step = torch.where(step < SMALLEST, 0.0, step)
    finite = span.isfinite()
    scale = torch.where(finite, step, torch.nan).to(x.dtype)
    least = (torch.where(finite, low, torch.nan) + 0.0).to(x.dtype)  # not -0.0
    step = scale.float()[:, None]
    codes = torch.where(step > 0, (keys - least.float()[:, None]) / step, 0.0).round().clamp(0, 2**bits - 1)
    data = torch.zeros_like(codes[..., : x.shape[-1] // in_byte], dtype=torch.uint8)
    for n, part in enumerate(codes.to(torch.uint8).chunk(in_byte, -1)):
        data |= part << n * bits
    place = torch.full(x.shape[:1], -1, dtype=torch.int32, device=x.device)
    return ByChannel(data, scale, least, x.new_empty(0, *x.shape[1:]), place)


def check_bits(name: str, bits: int) -> int:
    """The bits, if they are 4 or 2; raises InputError for others, which argument `name` was."""
    if bits not in BITS:
        raise InputError(name, got=shown(bits), expected="4 or 2", hint="bits of a code of keys by channel")
    return bits


def check_channels(name: str, head_dim: int, bits: int) -> None:
    """Raise InputError where a row's codes would end inside a byte."""
    if head_dim % (8 // bits):
        raise InputError(
            name,
            got=f"head_dim {head_dim}",
            expected=f"a multiple of {8 // bits} for keys of {bits} bits",
            hint=f"a byte holds {8 // bits} numbers",
        )


def keys_of_pages(
    data: torch.Tensor,
    scale: torch.Tensor,
    least: torch.Tensor,
    opened: torch.Tensor,
    place: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """`ByChannel.keys` of several layers, which the first dimension of all but place and pages counts: least + code *
    scale, exact, rounded to float32. Nothing waits for a GPU.
    """
    found = decoded_by_channel(data[:, pages], scale[:, pages], least[:, pages])
    if not opened.shape[1]:
        return found
    rows = place[pages]
    is_open = (rows >= 0)[:, None, None, None]
    return torch.where(is_open, opened[:, rows.clamp(min=0)].float(), found)


def decoded_by_channel(data: torch.Tensor, scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """What codes (..., page_size, heads, bytes) stand for, float32."""
    in_byte = scale.shape[-1] // data.shape[-1]
    bits = 8 // in_byte
    codes = torch.cat([data >> n * bits & 2**bits - 1 for n in range(in_byte)], -1)
    scale, least = (x.double().unsqueeze(-3) for x in (scale, least))
    return (codes.double() * scale + least).float()


def _check_unit_stride(name: str, x: torch.Tensor) -> None:
    check_dense(f"ByChannel {name}", x, "a dense tensor", "`tilewise.quant.encode_by_channel` has all")
    if x.ndim < 1 or x.shape[-1] < 1 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        raise InputError(
            f"ByChannel {name}",
            got=f"shape {tuple(x.shape)}, strides {x.stride()}",
            expected="unit stride in the last dimension",
            hint="call .contiguous()",
        )
