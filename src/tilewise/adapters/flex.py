"""FlexAttention's calls (torch.nn.attention.flex_attention), run by tilewise: same signatures, no dense mask.

Differences from PyTorch's: no `torch.compile` is needed, and no seqlen_q x seqlen_k tensor is built in eager mode;
`create_block_mask` classifies tiles by interval arithmetic, when they are first read; `score_mod` and `mask_mod` are
traced, so they may use the operators that `tilewise.mask` accepts; `kernel_options`, which tune PyTorch's kernels, are
ignored. Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (2024).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import tilewise as tw
from tilewise.adapters.axes import autocast, check_tensors, raw_mask, raw_score, seqlen_first
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.flags import check_flags
from tilewise.formula.expr import Expr, load
from tilewise.formula.sizes import Size
from tilewise.formula.walk import symbols, transform
from tilewise.schedule.tilemap import EMPTY, FULL, PARTIAL, TileMap

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

MaskMod = Callable[..., Any]
_LISTS = ("num_blocks", "indices")
_LAZY = {f"{full}{axis}_{what}" for full in ("", "full_") for axis in ("kv", "q") for what in _LISTS}
_DQ_ORDER = ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")


class BlockMask(TorchBlockMask):
    """A mask function with its sizes. A `torch` BlockMask too: its lists of tiles are made when first read.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) -> bool over the query's own index; or a `tilewise.Mask`, which keeps
            tilewise's alignment (the last query stands at the last key); or None, everything visible.
        shape: (batch, heads, seqlen_q, seqlen_k); batch and heads are 1 where the mask does not depend on them.
        block_size: tile extents (queries, keys) of the lists.
        device: of the lists and of the captured tensors.

    Raises:
        FormulaError: `mask_mod` cannot be traced.
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
        """The mask as `tilewise.attention` takes it, for these lengths."""
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
        """EMPTY, PARTIAL or FULL for each tile: int8 (batch or 1, heads or 1, query tiles, key tiles)."""
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
        """PyTorch's own BlockMask with these tiles, for its `flex_attention`."""
        classes = self.to_tile_map().classes.expand(*self._lead, -1, -1).clone()
        for dim, length, block in zip((-2, -1), self.seq_lengths, self.BLOCK_SIZE, strict=True):
            if length % block:  # PyTorch lists a tile that reaches beyond the lengths as partial
                classes.narrow(dim, -1, 1).clamp_(max=PARTIAL)
        made: TorchBlockMask = TileMap(classes, *self.seq_lengths, *self.BLOCK_SIZE).to_block_mask(self.mask_mod)
        return made

    def sparsity(self) -> float:
        """What PyTorch calls so: 100 less the percentage of pairs in tiles that are visited. Tiles that reach beyond a
        length count whole, so it may be below 0. 0 for a mask of no pairs.
        """
        tiles = self.to_tile_map()
        pairs = tiles.classes.shape[0] * tiles.classes.shape[1] * tiles.seqlen_q * tiles.seqlen_k
        visited = int((tiles.classes != EMPTY).sum()) * tiles.block_m * tiles.block_n
        return 100.0 * (1.0 - visited / pairs) if pairs else 0.0

    def contiguous(self) -> BlockMask:
        """Itself: nothing here is laid out in memory."""
        return self

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask with its captured tensors on `device`."""
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
        """PyTorch's own BlockMask of lists of tiles, which `flex_attention` takes too."""
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


def create_block_mask(
    mask_mod: MaskMod | tw.Mask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """FlexAttention's `create_block_mask` without its Q_LEN x KV_LEN tensor: traces `mask_mod` and keeps the formula.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) -> bool over the query's own index, or a `tilewise.Mask`.
        B, H: batch size and query heads that the mask depends on; None for a mask shared by all.
        Q_LEN, KV_LEN: sequence lengths.
        device: where attention will run; by default the accelerator, or the CPU where there is none.
        BLOCK_SIZE: tile extents of the lists that PyTorch's kernels would read; tilewise's own do not depend on it.
        _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order: accepted; about PyTorch's kernels only.

    Raises:
        InputError: a size is wrong.
        FormulaError: `mask_mod` cannot be traced (a data-dependent branch, an operation outside the formula language).
    """
    check_flags(
        _compile=_compile, separate_full_blocks=separate_full_blocks, compute_dq_write_order=compute_dq_write_order,
        dq_kv_order=dq_kv_order,
    )  # fmt: skip
    shared = "None for a mask shared by all"
    batch, heads = (1 if n is None else _integer(name, n, 0, shared) for name, n in (("B", B), ("H", H)))
    lengths = [_integer(name, n, 0, "of the attention to come") for name, n in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN))]
    blocks = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    hint = "(queries, keys) of a tile, 128 by default"
    if len(blocks) != 2:
        expected = "an integer >= 1, or two of them"
        raise InputError("create_block_mask BLOCK_SIZE", got=shown(BLOCK_SIZE), expected=expected, hint=hint)
    block_m, block_n = (_integer("BLOCK_SIZE", n, 1, hint) for n in blocks)
    device = device if device is not None else torch.accelerator.current_accelerator() or "cpu"
    shape = (batch, heads, lengths[0], lengths[1])
    return BlockMask(mask_mod, shape=shape, block_size=(block_m, block_n), device=device)


def _integer(name: str, value: Any, least: int, hint: str) -> Any:
    """An argument of `create_block_mask` as an int; symbolic ones of torch.compile stay so."""
    whole = isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)
    if not whole or value < least:
        raise InputError(f"create_block_mask {name}", got=shown(value), expected=f"an integer >= {least}", hint=hint)
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, int) else value


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


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | tw.Score | None = None,
    block_mask: TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` through `tilewise.attention`.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim).
        key, value: (batch or 1, num_heads_kv, seqlen_k, head_dim and head_dim_v).
        score_mod: function (score, b, h, q_idx, kv_idx) -> float over the query's own index, or a `tilewise.Score`;
            tensors that it captures take gradients.
        block_mask: from `create_block_mask`, this one or PyTorch's.
        scale: factor of query key^T; default head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads.
        return_lse, return_aux: also return the log-sum-exp (natural logarithm, float32, float64 for float64
            input, (batch, num_heads_q, seqlen_q), -inf for a row that sees no key), bare or in an AuxOutput.
        kernel_options: accepted and not used.

    Returns:
        (batch, num_heads_q, seqlen_q, head_dim_v), alone or with what was asked for.

    Raises:
        InputError: shapes that FlexAttention refuses too. UnsupportedError: `AuxRequest(max_scores=True)`.
    """
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    hint = "x[None] adds a batch dimension"
    check_tensors("(batch, heads, seqlen, dim)", (4,), hint, query=query, key=key, value=value)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InputError(
            "key", got=f"{key.shape[1]} heads", expected=f"{query.shape[1]} as query", hint="pass enable_gqa=True"
        )
    if return_aux is not None:
        if return_lse:
            hint = "return_aux=AuxRequest(lse=True) alone"
            raise InputError("return_lse", got="True with return_aux", expected="one of them", hint=hint)
        if not isinstance(return_aux, AuxRequest):
            hint = "None returns the output alone"
            raise InputError("return_aux", got=shown(return_aux), expected="AuxRequest(lse=True) or None", hint=hint)
        check_flags(lse=return_aux.lse, max_scores=return_aux.max_scores)
        if return_aux.max_scores:
            raise UnsupportedError(
                "return_aux", got="max_scores=True", expected="AuxRequest(lse=True)", hint="lse bounds the scores"
            )
    if key.shape[0] == 1 and query.shape[0] > 1 and block_mask is not None:
        key, value = key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    mask = None if block_mask is None else mask_of(_fitting(block_mask, seqlen_q, seqlen_k), seqlen_q, seqlen_k)
    if score_mod is not None and not isinstance(score_mod, tw.Score):
        score_mod = raw_score(score_mod, seqlen_k - seqlen_q)
    q, k, v = (seqlen_first(x) for x in autocast(query, key, value))
    o, lse = tw.attention_with_lse(q, k, v, mask=mask, score=score_mod, scale=scale)
    o = o.transpose(1, 2)
    if return_aux is not None:
        return o, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (o, lse) if return_lse else o


def _fitting(block_mask: TorchBlockMask, seqlen_q: int, seqlen_k: int) -> TorchBlockMask:
    """Raise unless this is a BlockMask for these lengths (one with a single huge tile fits any)."""
    if not isinstance(block_mask, TorchBlockMask):
        hint = "create_block_mask makes one of a function or of a tilewise.Mask"
        raise InputError("block_mask", got=type(block_mask).__name__, expected="a BlockMask or None", hint=hint)
    if block_mask.BLOCK_SIZE[0] < 1 << 30 and tuple(block_mask.shape[-2:]) != (seqlen_q, seqlen_k):
        raise InputError(
            "block_mask",
            got=f"shape {tuple(block_mask.shape)}",
            expected=f"seqlen_q {seqlen_q}, seqlen_k {seqlen_k}",
            hint="create a BlockMask for these lengths",
        )
    return block_mask
