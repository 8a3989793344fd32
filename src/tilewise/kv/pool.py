"""The memory behind the pages: keys and values of all layers."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.ops.kv_write import copy_pages
from tilewise.ops.kv_write.problem import DTYPES
from tilewise.quant import Encoded
from tilewise.quant.codes import check_head_dim, kind_of

ORDERS = ("NHD", "HND")


class PagePool:
    """Pages of keys and values for each layer, all numbered alike: a page holds the same tokens in every layer.

    Args:
        num_layers, num_pages, page_size, num_heads_kv, head_dim: sizes; num_pages * page_size is below 2**31.
        head_dim_v: of values; None for head_dim.
        dtype: float16, bfloat16 or float32; with `encoding` codes have a type of their own.
        device: where the pages are.
        order: of a page in memory, "NHD" (token, head, dim) or "HND" (head, token, dim). Either way `pages` are views
            (num_pages, page_size, num_heads_kv, head_dim).
        encoding: None, or "int8", "fp8" or "int4": codes, and a float32 scale for each token and head
            (`tilewise.quant`). What is written is encoded on the way, from any of these dtypes.

    Raises:
        InputError: a size that is not a positive integer, too many slots, another dtype, order or encoding, or an odd
            head_dim for "int4".
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        order: str = "NHD",
        encoding: str | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {
            "num_layers": num_layers, "num_pages": num_pages, "page_size": page_size, "num_heads_kv": num_heads_kv,
            "head_dim": head_dim, "head_dim_v": head_dim_v,
        }  # fmt: skip
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise InputError(name, got=repr(size), expected="an integer, at least 1", hint="give a count")
        if num_pages * page_size >= 2**31:
            raise InputError(
                "num_pages",
                got=f"{num_pages} pages of {page_size}",
                expected="fewer than 2**31 slots in all",
                hint="slots travel as int32; make several pools",
            )
        if dtype not in DTYPES:
            raise InputError("dtype", got=dtype, expected="float16, bfloat16 or float32", hint="that of k and v")
        if order not in ORDERS:
            raise InputError("order", got=repr(order), expected="'NHD' or 'HND'", hint="how a page lies in memory")
        page = (page_size, num_heads_kv) if order == "NHD" else (num_heads_kv, page_size)
        self.num_layers, self.num_pages, self.page_size, self.order = num_layers, num_pages, page_size, order
        self.encoding = encoding
        widths = (head_dim, head_dim_v)
        self._scales: tuple[torch.Tensor, ...] = ()
        if encoding is not None:
            kind = kind_of("encoding", encoding)
            for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
                check_head_dim(name, dim, encoding)
            dtype, widths = kind.dtype, (head_dim // kind.in_byte, head_dim_v // kind.in_byte)
            self._scales = tuple(torch.zeros(num_layers, num_pages, *page, device=device) for _ in range(2))
        self._memory = tuple(
            torch.zeros(num_layers, num_pages, *page, width, dtype=dtype, device=device) for width in widths
        )

    def pages(self, layer: int) -> tuple[torch.Tensor | Encoded, torch.Tensor | Encoded]:
        """(k_pages, v_pages) of a layer, as `tilewise.kv_write` and `tilewise.attention` take them: views, or with an
        encoding two `Encoded` of views.
        """
        if not 0 <= layer < self.num_layers:
            raise InputError("layer", got=layer, expected=f"0 to {self.num_layers - 1}", hint="layers count from 0")
        every = (*self._memory, *self._scales)
        k, v, *scales = (x[layer] if self.order == "NHD" else x[layer].transpose(1, 2) for x in every)
        return (Encoded(k, scales[0]), Encoded(v, scales[1])) if scales else (k, v)

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy pages onto others in all layers, in one launch, with an encoding in two: `pairs` as
        `tilewise.copy_pages` takes them.
        """
        # what a page holds of one layer lies in one piece: as if layers were its tokens, of one long head
        pages: list[Any] = [x.flatten(2)[:, :, None].transpose(0, 1) for x in self._memory]
        if self._scales:  # or of as many heads as there are scales
            pages = [
                Encoded(x.flatten(2, 3).transpose(0, 1), scale.flatten(2).transpose(0, 1))
                for x, scale in zip(self._memory, self._scales, strict=True)
            ]
        with torch.no_grad():
            copy_pages(pages[0], pages[1], pairs)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, or of their codes."""
        return self._memory[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._memory[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers, scales included."""
        return sum(x.nbytes for x in (*self._memory, *self._scales))
