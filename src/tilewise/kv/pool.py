"""The memory behind the pages: keys and values of all layers."""

from __future__ import annotations

import torch

from tilewise.core.devices import checked_device
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.flags import check_flags
from tilewise.core.readback import host_range, values_checked
from tilewise.core.tensors import check_dense
from tilewise.layouts import PageSummaries
from tilewise.ops.kv_write import copy_pages
from tilewise.ops.kv_write.problem import DTYPES
from tilewise.quant import ByChannel, Encoded
from tilewise.quant.channels import check_bits, check_channels, keys_of_pages
from tilewise.quant.codes import check_head_dim, kind_of

ORDERS = ("NHD", "HND")
_ALIGNED = 16  # bytes at which codes, and scales, begin


class PagePool:
    """Pages of keys and values for each layer: page n holds the same tokens in every layer.

    Args:
        num_layers, num_pages, page_size, num_heads_kv, head_dim: sizes; num_pages * page_size is below 2**31.
        head_dim_v: of values; None for head_dim.
        dtype: float16, bfloat16 or float32; codes of `encoding` have a dtype of their own.
        device: of the pages.
        order: of a page in memory, "NHD" (token, head, dim) or "HND" (head, token, dim); None for "NHD", with
            `encoding` "HND". Either way `pages` returns views (num_pages, page_size, num_heads_kv, head_dim). Codes and
            scales are read fastest where those of keys and of values lie together: of a page's head in "HND", of a page
            in "NHD".
        encoding: None, or "int8", "fp8" or "int4": codes, and a float32 scale for each token and head
            (`tilewise.quant.encode`). `Batch.write` encodes, from any of these dtypes.
        keys_by_channel: None, or 4 or 2: bits of keys that are encoded by channel, a page when it is full
            (`tilewise.quant.ByChannel`); pages that are not full keep keys in `dtype`. Values then have `encoding`,
            which must be given. Each page has a scale and a minimum for each channel: large pages spend fewer bytes on
            them.
        open_pages: with `keys_by_channel`, how many pages can be partly filled at once: one for each live sequence.
        summaries: whether each layer has `tilewise.PageSummaries`; not with an encoding.
        columns: None, or with summaries 8 or 4: bits of their codes of keys by dimension.

    Raises:
        InputError: a size that is not a positive integer, too many slots, another dtype, order, encoding or number of
            bits, one of `keys_by_channel` and `open_pages` without the other or without an encoding, a head_dim
            whose codes would end inside a byte, or summaries of codes.

    Example:
        >>> pool = tw.kv.PagePool(2, 8, 16, num_heads_kv=2, head_dim=16, encoding="int8")
        >>> k_pages, v_pages = pool.pages(0)
        >>> k_pages.shape, pool.nbytes
        ((8, 16, 2, 16), 20480)
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
        keys_by_channel: int | None = None,
        open_pages: int | None = None,
        summaries: bool = False,
        columns: int | None = None,
    ) -> None:
        check_flags(summaries=summaries)
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {
            "num_layers": num_layers, "num_pages": num_pages, "page_size": page_size, "num_heads_kv": num_heads_kv,
            "head_dim": head_dim, "head_dim_v": head_dim_v,
        }  # fmt: skip
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InputError(name, got=shown(size), expected="an integer, at least 1", hint="give a count")
        if num_pages * page_size >= 2**31:
            raise InputError(
                "num_pages",
                got=f"{num_pages} pages of {page_size}",
                expected="fewer than 2**31 slots in all",
                hint="slots travel as int32; make several pools",
            )
        if dtype not in DTYPES:
            raise InputError("dtype", got=dtype, expected="float16, bfloat16 or float32", hint="that of k and v")
        device = checked_device(device, "cpu is where pages lie without it")
        order = order or ("HND" if encoding else "NHD")
        if order not in ORDERS:
            raise InputError("order", got=shown(order), expected="'NHD' or 'HND'", hint="how a page lies in memory")
        page = (page_size, num_heads_kv) if order == "NHD" else (num_heads_kv, page_size)
        self.num_layers, self.num_pages, self.page_size, self.order = num_layers, num_pages, page_size, order
        self.encoding = encoding
        by_channel = check_by_channel(keys_by_channel, open_pages, encoding, head_dim)
        self.key_bits = keys_by_channel
        self._channels: tuple[torch.Tensor, ...] = ()  # of keys: scale, least, open
        self._place = torch.full((num_pages,), -1, dtype=torch.int32, device=device)
        of_layers = (num_layers, num_pages)
        self._summaries: tuple[PageSummaries, ...] = ()
        if columns is not None and not summaries:
            raise InputError(
                "columns", got=columns, expected="None without summaries", hint="summaries=True keeps them"
            )
        if encoding is None:
            self._memory = tuple(
                torch.zeros(*of_layers, *page, d, dtype=dtype, device=device) for d in (head_dim, head_dim_v)
            )
            self._views = self._memory
            if summaries:
                self._summaries = tuple(
                    PageSummaries.of(k, v, columns) for k, v in zip(*map(self._ordered, self._memory), strict=True)
                )
            return
        if summaries:
            raise InputError("summaries", got=True, expected="False with an encoding", hint="codes have no summaries")
        kind = kind_of("encoding", encoding)
        for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v))[by_channel is not None :]:
            check_head_dim(name, dim, encoding)
        parts = [(kind.dtype, head_dim // kind.in_byte), (kind.dtype, head_dim_v // kind.in_byte)]
        parts += [(torch.float32, 1)] * 2
        if by_channel:
            bits, count = by_channel
            parts = [(torch.uint8, head_dim * bits // 8), *parts[1:3]]
            shapes = [(num_pages, num_heads_kv, head_dim)] * 2 + [(count, *page, head_dim)]
            self._channels = tuple(torch.zeros(num_layers, *shape, dtype=dtype, device=device) for shape in shapes)
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

    def pages(self, layer: int) -> tuple[torch.Tensor | Encoded | ByChannel, torch.Tensor | Encoded]:
        """The pages of a layer, as `tilewise.kv_write` and `tilewise.attention` take them.

        Args:
            layer: number of the layer, from 0.

        Returns:
            (k_pages, v_pages): views of the pool's memory, each (num_pages, page_size, num_heads_kv, dim). With an
            encoding two `Encoded` of views, or a `ByChannel` and an `Encoded`.

        Raises:
            InputError: there is no such layer.
        """
        self._check_layer(layer)
        k, v, *scales = (self._ordered(x)[layer] for x in self._views)
        if not scales:
            return k, v
        values = Encoded(v, scales[-1][..., 0])
        if not self._channels:
            return Encoded(k, scales[0][..., 0]), values
        scale, least, opened = self._channels
        return ByChannel(k, scale[layer], least[layer], self._ordered(opened)[layer], self._place), values

    def summaries(self, layer: int) -> PageSummaries | None:
        """The summaries of a layer's pages.

        Args:
            layer: number of the layer, from 0.

        Returns:
            `tilewise.PageSummaries`; None where the pool has none.

        Raises:
            InputError: there is no such layer.
        """
        self._check_layer(layer)
        return self._summaries[layer] if self._summaries else None

    def _check_layer(self, layer: int) -> None:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < self.num_layers:
            got = shown(layer) if isinstance(layer, (int, float, str)) else type(layer).__name__
            raise InputError("layer", got=got, expected=f"0 to {self.num_layers - 1}", hint="layers count from 0")

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy pages onto others in all layers, in one launch.

        With `keys_by_channel`, a copy that will be written also needs `open`, which gives it keys in `dtype`.

        Args:
            pairs: int32 or int64 (n, 2), a page and the page that becomes its copy, as in `tilewise.copy_pages`.

        Raises:
            InputError: no such tensor, or pages that do not exist.
        """
        # what a page holds of one layer lies in one piece: as if layers were its tokens, of one long head
        pages = [x.flatten(2)[:, :, None].transpose(0, 1) for x in self._memory]
        if self.encoding:  # bytes by twos, the first half of them as keys
            pages = [*pages[0].view(torch.float16).chunk(2, -1)]
        with torch.no_grad():
            copy_pages(pages[0], pages[1], pairs)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy tokens' keys and values, codes and scales, to other slots in all layers: all are read before any is
        written.

        Args:
            sources, targets: int64 (n,), slots (page * page_size + offset). Where a target occurs twice, so does its
                source.

        Raises:
            UnsupportedError: a pool with keys by channel or with summaries, which belong to whole pages.
        """
        if self._channels or self._summaries:
            raise UnsupportedError(
                "move",
                got="keys by channel" if self._channels else "summaries",
                expected="pages of keys and values alone",
                hint="both belong to whole pages",
            )
        for x in map(self._ordered, self._views):  # (layers, pages, page_size, heads, width)
            pages, offsets = sources // self.page_size, sources % self.page_size
            if x.itemsize == 1:
                x = x.view(torch.uint8)  # PyTorch cannot index float8
            moved = x[:, pages, offsets]
            x[:, targets // self.page_size, targets % self.page_size] = moved

    def open(self, opened: torch.Tensor, places: torch.Tensor) -> None:
        """With `keys_by_channel`, copy keys of pages into rows of `ByChannel.open`, in all layers, and set places.

        Args:
            opened: int32 or int64 (n, 2): a page, and the row that gets its keys.
            places: int32 (n, 2): a page, and its place from now on, as in `tilewise.quant.ByChannel`.

        Raises:
            InputError: a pool without keys by channel, no such tensors, or, where values are checked, pages or rows
                that do not exist.
        """
        if not self._channels:
            raise InputError(
                "open",
                got="a pool without keys by channel",
                expected="one with them",
                hint="PagePool(..., keys_by_channel=4)",
            )
        scale, least, rows = self._channels
        ends = (self.num_pages, rows.shape[1])
        for name, x, most in (("opened", opened, ends), ("places", places, ends[:1])):
            _check_pairs(name, x, self.device, most)
        keys, rows = self._ordered(self._views[0]), self._ordered(rows)
        if opened.shape[0]:
            found = keys_of_pages(keys, scale, least, rows, self._place, opened[:, 0])
            rows[:, opened[:, 1]] = found.to(rows.dtype)
        self._place[places[:, 0]] = places[:, 1]

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """(layers, pages, tokens, heads, ...) of memory in this pool's order."""
        return x if self.order == "NHD" else x.transpose(2, 3)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, or of their codes; of values where keys have others."""
        return self._views[1].dtype

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._memory[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers, scales, open pages and summaries included."""
        summaries = (x for layer in self._summaries for x in layer.tensors.values())
        return sum(x.nbytes for x in (*self._memory, *self._channels, *summaries))


def _check_pairs(name: str, x: torch.Tensor, device: torch.device, ends: tuple[int, ...]) -> None:
    """Raise InputError unless x is (n, 2) integers whose columns lie below `ends`, where values are checked."""
    expected, hint = f"an int32 or int64 tensor (n, 2) on {device}", "KVCache.extend makes it"
    check_dense(name, x, expected, hint)
    if x.ndim != 2 or x.shape[1] != 2 or x.dtype not in (torch.int32, torch.int64) or x.device != device:
        raise InputError(name, got=f"{x.dtype} {tuple(x.shape)} on {x.device}", expected=expected, hint=hint)
    for column, end in enumerate(ends if values_checked(device) and x.shape[0] else ()):
        low, high = host_range(x[:, column]) or (0, 0)
        if not 0 <= low <= high < end:
            got = f"{low if low < 0 else high} in column {column}"
            raise InputError(name, got=got, expected=f"0 to {end - 1}", hint=hint)


def check_by_channel(
    bits: int | None, open_pages: int | None, encoding: str | None, head_dim: int
) -> tuple[int, int] | None:
    """(bits, open pages) of keys by channel, None for others; raises InputError."""
    if bits is None:
        if open_pages is not None:
            raise InputError(
                "open_pages", got=open_pages, expected="None without keys_by_channel", hint="keys_by_channel=4 or 2"
            )
        return None
    check_bits("keys_by_channel", bits)
    check_channels("head_dim", head_dim, bits)
    if encoding is None:
        raise InputError(
            "encoding",
            got="none, with keys_by_channel",
            expected="the encoding of values",
            hint="encoding='int4', for example",
        )
    if not isinstance(open_pages, int) or open_pages < 1:
        raise InputError(
            "open_pages",
            got=shown(open_pages),
            expected="an integer, at least 1",
            hint="partly filled pages keep their keys in 16 or 32 bits: one page for each live sequence",
        )
    return bits, open_pages
