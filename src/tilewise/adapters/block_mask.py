"""FlexAttention's BlockMask, of a mask that is a formula: its lists of tiles are made when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import noop_mask

import tilewise as tw
from tilewise.adapters.axes import raw_mask
from tilewise.formula.expr import Expr, load
from tilewise.formula.sizes import Size
from tilewise.formula.walk import symbols, transform
from tilewise.schedule.tilemap import EMPTY, FULL, PARTIAL, TileMap

MaskMod = Callable[..., Any]
_LISTS = ("num_blocks", "indices")
_LAZY = {f"{full}{axis}_{what}" for full in ("", "full_") for axis in ("kv", "q") for what in _LISTS}
_DQ_ORDER = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")


class BlockMask(TorchBlockMask):
    """A mask function with its sizes. It is also PyTorch's BlockMask: its lists of tiles are made when first read.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) -> bool over the query's own index; or a `tilewise.Mask`, which keeps
            tilewise's alignment (the last query has the position of the last key); or None, everything visible.
        shape: (batch, heads, seqlen_q, seqlen_k); batch and heads are 1 where the mask does not depend on them.
        block_size: tile extents (queries, keys) of the lists.
        device: of the lists and of the captured tensors.

    Raises:
        FormulaError: `mask_mod` cannot be traced.

    Example:
        >>> from tilewise.adapters.flex import BlockMask
        >>> BlockMask(lambda b, h, q, k: q >= k, shape=(1, 1, 256, 256)).sparsity()
        25.0
    """

    def __init__(
        self,
        mask_mod: MaskMod | tw.Mask | None,
        *,
        shape: tuple[int, int, int, int],
        block_size: tuple[int, int] = (128, 128),
        device: torch.device | str = "cpu",
    ) -> None:
        self.seq_lengths = (shape[2], shape[3])
        self.BLOCK_SIZE = block_size
        self.device = torch.device(device)
        self._lead = (shape[0], shape[1])
        self.mask_mod = mask_mod

    @property
    def mask_mod(self) -> MaskMod:
        """The mask as PyTorch's FlexAttention takes it; what is assigned is traced anew."""
        return self._evaluated

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskMod | tw.Mask | None) -> None:
        self._source = mask_mod
        self._evaluated = _mask_mod(mask_mod, self.seq_lengths[1] - self.seq_lengths[0])
        self._masks: dict[int, tw.Mask | None] = {}
        for lazy in _LAZY:
            self.__dict__.pop(lazy, None)
        self.mask_for(*self.seq_lengths)

    def mask_for(self, seqlen_q: int, seqlen_k: int) -> tw.Mask | None:
        """The mask as `tilewise.attention` takes it.

        Args:
            seqlen_q, seqlen_k: sequence lengths of the call.

        Returns:
            A `tilewise.Mask`; None if everything is visible.
        """
        if self._source is None or isinstance(self._source, tw.Mask):
            return self._source
        shift = seqlen_k - seqlen_q
        if shift not in self._masks:
            self._masks[shift] = self._sized(raw_mask(self._source, shift))
        return self._masks[shift]

    def _sized(self, mask: tw.Mask) -> tw.Mask:
        """The mask, for the batch and the heads alone that it was made for, where it looks at these."""
        looked = symbols(mask.expr)
        axes = (("batch", "b", self._lead[0]), ("num_heads_q", "h", self._lead[1]))
        return mask.sized(*(Size("block_mask", axis, n) for axis, symbol, n in axes if n > 1 and symbol in looked))

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, heads, seqlen_q, seqlen_k)."""
        return (*self._lead, *self.seq_lengths)

    def to_tile_map(self) -> TileMap:
        """The class of each tile, found by interval arithmetic.

        Returns:
            A `TileMap`; its classes EMPTY, PARTIAL or FULL are int8 (batch or 1, heads or 1, query tiles, key tiles).
        """
        seqlen_q, seqlen_k = self.seq_lengths
        return TileMap.build(
            self.mask_for(seqlen_q, seqlen_k),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            batch=max(self._lead[0], 1),
            heads=max(self._lead[1], 1),
            block_m=self.BLOCK_SIZE[0],
            block_n=self.BLOCK_SIZE[1],
            device=self.device,
        )

    def to_torch(self) -> TorchBlockMask:
        """These tiles for PyTorch's own `flex_attention`.

        Returns:
            PyTorch's BlockMask.
        """
        classes = self.to_tile_map().classes.expand(*self._lead, -1, -1).clone()
        for dim, length, block in zip((-2, -1), self.seq_lengths, self.BLOCK_SIZE, strict=True):
            if length % block:  # PyTorch lists a tile that reaches beyond the lengths as partial
                classes.narrow(dim, -1, 1).clamp_(max=PARTIAL)
        made: TorchBlockMask = TileMap(classes, *self.seq_lengths, *self.BLOCK_SIZE).to_block_mask(self.mask_mod)
        return made

    def sparsity(self) -> float:
        """The percentage of pairs in tiles that are not visited, as PyTorch computes it.

        Tiles that reach beyond a sequence count with all of their pairs, so the result may be negative.

        Returns:
            A number up to 100; 0 for a mask of no pairs.
        """
        tiles = self.to_tile_map()
        pairs = tiles.classes.shape[0] * tiles.classes.shape[1] * tiles.seqlen_q * tiles.seqlen_k
        visited = int((tiles.classes != EMPTY).sum()) * tiles.block_m * tiles.block_n
        return 100.0 * (1.0 - visited / pairs) if pairs else 0.0

    def contiguous(self) -> BlockMask:
        """For PyTorch's interface: a formula has no memory layout.

        Returns:
            This mask.
        """
        return self

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask with its captured tensors on another device.

        Args:
            device: where attention will run.

        Returns:
            A BlockMask; this one if it is there already.
        """
        device, mask = torch.device(device), self.mask_for(*self.seq_lengths)

        def moved(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            return load(node.value.to(device), args) if node.op == "load" else None

        if device == self.device:
            return self
        source = None if mask is None else tw.Mask(transform(mask.expr, moved), mask.name, mask.joins, mask.sizes)
        return BlockMask(source, shape=(*self._lead, *self.seq_lengths), block_size=self.BLOCK_SIZE, device=device)

    def __getitem__(self, index: Any) -> Any:
        return self.to_torch()[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return _block_mask, (self._source, self.shape, self.BLOCK_SIZE, self.device)

    @classmethod
    def from_kv_blocks(cls, *args: Any, **options: Any) -> TorchBlockMask:  # type: ignore[override]
        """PyTorch's own BlockMask of lists of tiles, which `flex_attention` takes too.

        Args:
            args, options: as PyTorch's `BlockMask.from_kv_blocks` takes them.

        Returns:
            PyTorch's BlockMask.
        """
        return TorchBlockMask.from_kv_blocks(*args, **options)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        shape = (*self._lead, new_q_len, new_kv_len)
        return BlockMask(self._source, shape=shape, block_size=self.BLOCK_SIZE, device=self.device)

    def __getattr__(self, name: str) -> Any:
        if name in _DQ_ORDER:  # metadata of one of PyTorch's own kernels
            return None
        if name not in _LAZY:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made = self.to_torch()
        for lazy in _LAZY:
            self.__dict__[lazy] = getattr(made, lazy)
        return self.__dict__[name]

    def __repr__(self) -> str:
        return f"BlockMask({self.mask_for(*self.seq_lengths)!r}, shape={self.shape}, block_size={self.BLOCK_SIZE})"

    __str__ = __repr__


def _block_mask(source: Any, shape: Any, block_size: Any, device: Any) -> BlockMask:
    return BlockMask(source, shape=shape, block_size=block_size, device=device)


def _mask_mod(source: MaskMod | tw.Mask | None, shift: int) -> MaskMod:
    """The mask as PyTorch's FlexAttention wants it."""
    if source is None:
        return noop_mask
    if not isinstance(source, tw.Mask):
        return source

    def evaluated(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return source.evaluate(b=b, h=h, i=q_idx + shift, j=kv_idx)

    return evaluated


def mask_of(block_mask: TorchBlockMask, seqlen_q: int, seqlen_k: int) -> tw.Mask | None:
    """The mask of a BlockMask, ours or PyTorch's, as `tilewise.attention` takes it.

    PyTorch's kernels apply `mask_mod` only where a tile is listed, and not at all where it is listed as full: where the
    lists of a BlockMask say other than its `mask_mod`, so does this mask. They are compared once for each BlockMask.
    """
    if isinstance(block_mask, BlockMask):
        return block_mask.mask_for(seqlen_q, seqlen_k)
    known, mask_mod = getattr(block_mask, "_tilewise", None), block_mask.mask_mod
    if known is None or known[0] is not mask_mod:
        device = block_mask.kv_num_blocks.device
        shape = (block_mask.shape[0], block_mask.shape[1], seqlen_q, seqlen_k)
        known = (mask_mod, BlockMask(_from_torch(block_mask), shape=shape, device=device))
        block_mask._tilewise = known  # type: ignore[attr-defined]
    mask: tw.Mask | None = known[1].mask_for(seqlen_q, seqlen_k)
    return mask


def _from_torch(block_mask: TorchBlockMask) -> MaskMod | None:
    """A function (b, h, q_idx, kv_idx) with the meaning of PyTorch's BlockMask; None where everything is visible."""
    mask_mod = block_mask.mask_mod
    block_m, block_n = block_mask.BLOCK_SIZE
    seqlen_q, seqlen_k = block_mask.seq_lengths
    if block_m >= 1 << 30 and mask_mod is noop_mask:
        return None
    listed = TileMap.from_block_mask(block_mask).classes
    batch, heads = listed.shape[:2]
    if mask_mod is not noop_mask and not torch.compiler.is_compiling():  # which could not act on the outcome
        own = BlockMask(
            mask_mod,
            shape=(batch, heads, seqlen_q, seqlen_k),
            block_size=(block_m, block_n),
            device=listed.device,
        ).to_tile_map()
        # a tile listed as full must be full by the function; one that is not listed must be empty by the function
        differs = ((listed == FULL) & (own.classes != FULL)) | ((listed == EMPTY) & (own.classes != EMPTY))
        if not bool(differs.any()):
            return mask_mod

    def by_tiles(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        index = (b if batch > 1 else 0, h if heads > 1 else 0, q_idx // block_m, kv_idx // block_n)
        kind = listed[index]
        return (kind == FULL) | ((kind != EMPTY) & mask_mod(b, h, q_idx, kv_idx))

    return by_tiles
