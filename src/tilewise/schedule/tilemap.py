"""Which tiles a mask needs: EMPTY, PARTIAL or FULL for each, found without looking at every pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.core.errors import InputError, shown
from tilewise.formula.check import prove
from tilewise.formula.evaluate import evaluate
from tilewise.formula.formula import Mask, as_mask
from tilewise.formula.reach import POSITION
from tilewise.formula.sizes import Sizes, check_sizes
from tilewise.formula.structure import Bound
from tilewise.schedule.rule import build_tables, tile_rule

EMPTY, PARTIAL, FULL = 0, 1, 2
_MOST = POSITION + 1
_CHUNK = 1 << 18  # tiles classified at a time: bounds the temporaries to a few MB


@dataclass(frozen=True)
class TileMap:
    """The class of each tile of a mask at one size: EMPTY (0), PARTIAL (1) or FULL (2). `TileMap.build` makes it.

    A tile is FULL only if every pair in it is visible, EMPTY only if none is. Of tiles that reach beyond seqlen_k, the
    pairs inside count.

    Attributes:
        classes: int8 (batch or 1, heads or 1, num_q_tiles, num_k_tiles).
        seqlen_q, seqlen_k: sequence lengths.
        block_m, block_n: queries and keys of a tile.

    Example:
        >>> from tilewise.schedule.tilemap import TileMap

        >>> tiles = TileMap.build(tw.causal, seqlen_q=100, seqlen_k=100, block_m=25, block_n=50)
        >>> tiles.classes[0, 0].tolist()
        [[1, 0], [1, 0], [2, 1], [2, 1]]
    """

    classes: torch.Tensor
    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int

    @staticmethod
    def build(
        mask: Mask | Any,
        *,
        seqlen_q: int,
        seqlen_k: int,
        batch: int = 1,
        heads: int = 1,
        block_m: int = 128,
        block_n: int = 128,
        device: torch.device | str = "cpu",
    ) -> TileMap:
        """Classify the tiles of a mask. Their pairs are not visited one by one.

        Args:
            mask: a Mask, a function (b, h, i, j) -> bool, or None for all pairs.
            seqlen_q, seqlen_k: sequence lengths; the last query stands at the last key.
            batch, heads: sizes of the dimensions that the mask may depend on; classes have 1 where it does not.
            block_m, block_n: queries and keys of a tile.
            device: of the classes; captured tensors must be there.

        Returns:
            A `TileMap`.

        Raises:
            InputError: an argument is out of range, or a captured tensor lies elsewhere.
            FormulaError: an index can leave its tensor.
        """
        lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        extents = {"batch": batch, "heads": heads, "block_m": block_m, "block_n": block_n}
        for name, size in (lengths | extents).items():
            least = 0 if name in lengths else 1
            if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= _MOST:
                hint, expected = "tiles, batch and heads start at 1", f"an integer from {least} to 2**29"
                raise InputError(f"TileMap {name}", got=shown(size), expected=expected, hint=hint)
        device = _device_of(device)
        tiles_q, tiles_k = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
        if mask is None:
            full = torch.full((1, 1, tiles_q, tiles_k), FULL, dtype=torch.int8, device=device)
            return TileMap(full, seqlen_q, seqlen_k, block_m, block_n)
        mask = as_mask(mask)
        bound = mask.bound
        for slot, tensor in enumerate(bound.tensors):
            if tensor.device != device:
                expected, hint = f"{device}, where the tiles are classified", "give TileMap.build that device"
                raise InputError(f"mask: captured tensor {slot}", got=str(tensor.device), expected=expected, hint=hint)
        if seqlen_q and seqlen_k:
            prove(bound, "mask", (batch, heads, seqlen_k - seqlen_q, seqlen_k))
        check_sizes(mask.sizes, Sizes(batch, heads, seqlen_q, seqlen_k))
        classes = classify(
            bound,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            batch=batch,
            heads=heads,
            block_m=block_m,
            block_n=block_n,
            device=device,
        )
        return TileMap(classes, seqlen_q, seqlen_k, block_m, block_n)

    def transposed(self) -> TileMap:
        """The same classes seen from the keys, for dK and dV.

        Returns:
            A `TileMap` with queries and keys exchanged.
        """
        return TileMap(self.classes.transpose(-1, -2), self.seqlen_k, self.seqlen_q, self.block_n, self.block_m)

    def lists(self, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each tile of queries, how many tiles of keys are of one class, and which.

        Args:
            kind: EMPTY, PARTIAL or FULL.

        Returns:
            (counts, tiles): int32 (..., num_q_tiles) and int32 (..., num_q_tiles, num_k_tiles), in which the first
            count entries matter.
        """
        chosen = self.classes == kind
        order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)

    def density(self) -> float:
        """The share of tiles that are visited.

        Returns:
            A float from 0 to 1.
        """
        return float((self.classes != EMPTY).float().mean()) if self.classes.numel() else 0.0

    def to_block_mask(self, mask_mod: Any = None) -> Any:
        """These tiles as a `torch.nn.attention.flex_attention.BlockMask`, with block_m and block_n as its block size.

        Args:
            mask_mod: the mask function that FlexAttention applies in PARTIAL tiles.

        Returns:
            A `BlockMask`.
        """
        from torch.nn.attention.flex_attention import BlockMask

        partial_count, partial = self.lists(PARTIAL)
        full_count, full = self.lists(FULL)
        return BlockMask.from_kv_blocks(
            partial_count.contiguous(),
            partial.contiguous(),
            full_count.contiguous(),
            full.contiguous(),
            BLOCK_SIZE=(self.block_m, self.block_n),
            mask_mod=mask_mod,
            seq_lengths=(self.seqlen_q, self.seqlen_k),
        )

    @staticmethod
    def from_block_mask(block_mask: Any) -> TileMap:
        """The tiles of a FlexAttention BlockMask.

        Args:
            block_mask: a `torch.nn.attention.flex_attention.BlockMask`.

        Returns:
            A `TileMap`.
        """
        block_m, block_n = block_mask.BLOCK_SIZE
        seqlen_q, seqlen_k = block_mask.seq_lengths
        tiles = (-(-seqlen_q // block_m), -(-seqlen_k // block_n))
        count = block_mask.kv_num_blocks
        classes = torch.zeros(*count.shape[:2], *tiles, dtype=torch.int8, device=count.device)
        pairs = (
            (PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices),
            (FULL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        )
        for kind, number, indices in pairs:
            if number is None:
                continue
            valid = torch.arange(indices.shape[-1], device=count.device) < number[..., None]
            marks = torch.zeros(*number.shape, tiles[1] + 1, dtype=torch.int8, device=count.device)
            marks.scatter_(-1, torch.where(valid, indices, tiles[1]).long(), kind)
            classes = torch.maximum(classes, marks[..., : tiles[1]])
        return TileMap(classes, seqlen_q, seqlen_k, block_m, block_n)


def _device_of(device: Any) -> torch.device:
    """The device as tensors there have it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as wrong:
        expected, hint = "a device that PyTorch has here", f"PyTorch says: {str(wrong).splitlines()[0]}"
        raise InputError("TileMap device", got=shown(device), expected=expected, hint=hint) from wrong


def classify(
    mask: Bound,
    *,
    seqlen_q: int,
    seqlen_k: int,
    batch: int,
    heads: int,
    block_m: int,
    block_n: int,
    device: torch.device | str = "cpu",
    first_batch: int = 0,
) -> torch.Tensor:
    """The int8 classes of `TileMap` for a bound mask; `first_batch` is the formula's b for the first element."""
    rule = tile_rule(mask.text)
    tiles_q, tiles_k = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    sizes = (batch if rule.by_batch else 1, heads if rule.by_head else 1)
    classes = torch.empty(*sizes, tiles_q, tiles_k, dtype=torch.int8, device=device)
    if not classes.numel():
        return classes
    tables = build_tables(rule.tables, mask.tensors, block_m, block_n)
    shift = seqlen_k - seqlen_q
    j0 = torch.arange(tiles_k, device=device) * block_n
    symbols = {
        "j0": j0,
        "j1": (j0 + block_n - 1).clamp(max=seqlen_k - 1),
        "block_i": torch.full((), block_m, device=device),
        "block_j": torch.full((), block_n, device=device),
    }
    rows = max(1, _CHUNK // tiles_k)
    for b in range(sizes[0]):
        for h in range(sizes[1]):
            symbols["b"] = torch.full((), first_batch + b, device=device)
            symbols["h"] = torch.full((), h, device=device)
            for start in range(0, tiles_q, rows):
                i0 = torch.arange(start, min(start + rows, tiles_q), device=device)[:, None] * block_m
                symbols["i0"] = i0 + shift
                symbols["i1"] = (i0 + block_m - 1).clamp(max=seqlen_q - 1) + shift
                sure, maybe = evaluate(
                    [rule.sure, rule.maybe], symbols, mask.tensors, mask.numbers, torch.float32, tables
                )
                classes[b, h, start : start + rows] = maybe.to(torch.int8) + (sure & maybe).to(torch.int8)
    return classes


class Tiles(NamedTuple):
    """Tiles of one axis: the sequence of each, and its first and last position, int64 (tiles,); of a slot that no tile
    has, the last one is before the first.
    """

    b: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def of_one(seqlen: int, block: int, device: torch.device) -> Tiles:
        """Those of one sequence."""
        first = torch.arange(0, seqlen, block, device=device)
        return Tiles(torch.zeros_like(first), first, (first + block).clamp(max=seqlen) - 1)

    @staticmethod
    def of_packed(cu_seqlens: torch.Tensor, total: int, block: int) -> Tiles:
        """Slots of packed sequences: those of sequence b begin at cu_seqlens[b] // block + b."""
        batch = cu_seqlens.shape[0] - 1
        slots = torch.arange(total // block + batch, device=cu_seqlens.device)
        starts = cu_seqlens[:-1] // block + torch.arange(batch, device=cu_seqlens.device)
        b = torch.searchsorted(starts, slots, right=True) - 1
        first = (slots - starts[b]) * block
        return Tiles(b, first, torch.minimum(first + block, cu_seqlens.diff()[b]) - 1)

    def moved(self, by: torch.Tensor | int) -> Tiles:
        """Their positions, so many further."""
        return Tiles(self.b, self.first + by, self.last + by)

    @property
    def middle(self) -> torch.Tensor:
        return self.first + (self.last - self.first).clamp(min=0) // 2


def paired(queries: Tiles, keys: Tiles) -> tuple[Tiles, Tiles, torch.Tensor]:
    """(Tiles of queries, tiles of keys, bool (tiles_q, tiles_k): whether both exist and are of one sequence). One that
    is in no such pair stands where one that is in one does: what formulas read is proved to be inside for these alone.
    """
    exist = (queries.last >= queries.first)[:, None] & (keys.last >= keys.first)
    same = exist & (queries.b[:, None] == keys.b)
    return _moved_inside(queries, same.any(1)), _moved_inside(keys, same.any(0)), same


def _moved_inside(tiles: Tiles, inside: torch.Tensor) -> Tiles:
    if not inside.shape[0]:
        return tiles
    some = inside.to(torch.int8).argmax(0, keepdim=True)  # by a tensor of 1: by a number, the host would wait
    any_inside = inside.any()
    return Tiles(*(torch.where(inside, x, torch.where(any_inside, x.index_select(0, some), 0)) for x in tiles))


def classify_pairs(
    mask: Bound | None, queries: Tiles, keys: Tiles, heads: int, block_m: int, block_n: int
) -> torch.Tensor:
    """The int8 classes of a mask's tiles of packed sequences, (1, heads or 1, slots_q, slots_k); pairs of different
    sequences are EMPTY.
    """
    queries, keys, same = paired(queries, keys)
    if mask is None:
        return same.to(torch.int8)[None, None] * FULL
    rule = tile_rule(mask.text)
    device = keys.first.device
    symbols = {
        "b": queries.b[:, None],
        "h": torch.arange(heads if rule.by_head else 1, device=device)[:, None, None],
        "i0": queries.first[:, None],
        "i1": queries.last[:, None],
        "j0": keys.first,
        "j1": keys.last,
        "block_i": torch.full((), block_m, device=device),
        "block_j": torch.full((), block_n, device=device),
    }
    tables = build_tables(rule.tables, mask.tensors, block_m, block_n)
    sure, maybe = evaluate([rule.sure, rule.maybe], symbols, mask.tensors, mask.numbers, torch.float32, tables)
    classes = (maybe & same).to(torch.int8) + (sure & maybe & same).to(torch.int8)
    return classes.expand(1, symbols["h"].shape[0], *same.shape).contiguous()
