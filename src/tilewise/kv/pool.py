"""The memory behind the pages: keys and values of all layers."""

from __future__ import annotations

import torch

from tilewise.core.errors import InputError
from tilewise.ops.kv_write import copy_pages
from tilewise.ops.kv_write.problem import DTYPES
from tilewise.quant import Encoded
from tilewise.quant.codes import check_head_dim, kind_of

ORDERS = ("NHD", "HND")
_ALIGNED = 16  # bytes at which codes, and scales, begin


class PagePool:
    """Pages of keys and values for each layer, all numbered alike: a page holds the same tokens in every layer.

    Args:
        num_layers, num_pages, page_size, num_heads_kv, head_dim: sizes; num_pages * page_size is below 2**31.
        head_dim_v: of values; None for head_dim.
        dtype: float16, bfloat16 or float32; with `encoding` codes have a type of their own.
        device: where the pages are.
        order: of a page in memory, "NHD" (token, head, dim) or "HND" (head, token, dim); None for "NHD", of codes for
            "HND". Either way `pages` are views (num_pages, page_size, num_heads_kv, head_dim). Codes and scales of keys
            and values that lie together are read fastest: a head's of a page in "HND", a page's in "NHD".
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
        order: str | None = None,
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
        order = order or ("HND" if encoding else "NHD")
        if order not in ORDERS:
            raise InputError("order", got=repr(order), expected="'NHD' or 'HND'", hint="how a page lies in memory")
        page = (page_size, num_heads_kv) if order == "NHD" else (num_heads_kv, page_size)
        self.num_layers, self.num_pages, self.page_size, self.order = num_layers, num_pages, page_size, order
        self.encoding = encoding
        of_layers = (num_layers, num_pages)
        if encoding is None:
            self._memory = tuple(
                torch.zeros(*of_layers, *page, d, dtype=dtype, device=device) for d in (head_dim, head_dim_v)
            )
            self._views = self._memory
            return
        kind = kind_of("encoding", encoding)
        for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            check_head_dim(name, dim, encoding)
        parts = [(kind.dtype, head_dim // kind.in_byte), (kind.dtype, head_dim_v // kind.in_byte)]
        parts += [(torch.float32, 1)] * 2
        runs, rows = (1, page_size * num_heads_kv) if order == "NHD" else (num_heads_kv, page_size)
        begins = [0]
        for part, width in parts:
            begins.append(begins[-1] + rows * width * part.itemsize)
            if part != torch.float32 or len(begins) > len(parts):
                begins[-1] += -begins[-1] % _ALIGNED
        memory = torch.zeros(*of_layers, runs, begins.pop(), dtype=torch.uint8, device=device)
        self._memory = (memory,)
        self._views = tuple(
            memory.narrow(-1, begin, rows * width * part.itemsize).view(part).view(*of_layers, *page, width)
            for begin, (part, width) in zip(begins, parts, strict=True)
        )

    def pages(self, layer: int) -> tuple[torch.Tensor | Encoded, torch.Tensor | Encoded]:
        """(k_pages, v_pages) of a layer, as `tilewise.kv_write` and `tilewise.attention` take them: views, or with an
        encoding two `Encoded` of views.
        """
        if not 0 <= layer < self.num_layers:
            raise InputError("layer", got=layer, expected=f"0 to {self.num_layers - 1}", hint="layers count from 0")
        k, v, *scales = (x[layer] if self.order == "NHD" else x[layer].transpose(1, 2) for x in self._views)
        return (Encoded(k, scales[0][..., 0]), Encoded(v, scales[1][..., 0])) if scales else (k, v)

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy pages onto others in all layers, in one launch: `pairs` as `tilewise.copy_pages` takes them."""
        # what a page holds of one layer lies in one piece: as if layers were its tokens, of one long head
        pages = [x.flatten(2)[:, :, None].transpose(0, 1) for x in self._memory]
        if self.encoding:  # bytes by twos, the first half of them as keys
            pages = [*pages[0].view(torch.float16).chunk(2, -1)]
        with torch.no_grad():
            copy_pages(pages[0], pages[1], pairs)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, or of their codes."""
        return self._views[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._memory[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers, scales included."""
        return sum(x.nbytes for x in self._memory)
