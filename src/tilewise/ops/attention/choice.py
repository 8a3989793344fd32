"""Which tiles of keys a call takes by a selection, and the masks that say so."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import constant, host_values, unreadable, values_checked
from tilewise.core.tensors import check_all_dense, check_dense
from tilewise.formula import expr as e
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr
from tilewise.formula.formula import Mask, mask
from tilewise.formula.structure import Bound
from tilewise.layouts import Packed, copied
from tilewise.ops.attention.arguments import ENCODABLE, WIDEST_ENCODABLE
from tilewise.ops.attention.problem import Call, check_mask
from tilewise.ops.quantize.problem import has_sums
from tilewise.ops.select.problem import Call as Rows
from tilewise.ops.select.table import TAKE
from tilewise.ops.tile_means import tile_means
from tilewise.ops.tile_scores.problem import Call as Sums
from tilewise.ops.tile_scores.problem import scores_of_means
from tilewise.ops.tile_scores.table import TILE_SCORES
from tilewise.quant.blocks import rows_of_block
from tilewise.quant.schemes import Scheme
from tilewise.schedule.selection import PerHead, Prediction, Select, Sparge, TopK
from tilewise.schedule.tilemap import EMPTY, FULL, PARTIAL, Tiles, classify, classify_pairs, paired


@dataclass(frozen=True, eq=False)
class Selected:
    """The tiles of keys that each tile of queries computes: what `tilewise.select_tiles` returns.

    Attributes:
        kept: bool (1 or batch, 1, num_heads_kv or num_heads_q, tiles_q, tiles_k), True where a tile is computed. Packed
            sequences have slots, (1, heads, slots_q, slots_k): sequence b's begin at cu_seqlens[b] // block + b.
        classes: int8, likewise: 0 where the mask hides all of a tile, 1 a part, 2 nothing.
        block: queries and keys of a tile; queries are counted from the first, whatever their place on the key axis.
        seqlen_q, seqlen_k: sequence lengths, or the totals of packed sequences.
        far: what stands for the other tiles.
        skip: `lam` of the selection (see `Sparge`), one number or one for each query head, or None.
        layout: of packed sequences.

    Example:
        >>> found = tw.select_tiles(q, k, tw.Select(tw.TopK(2), block=25))
        >>> found.density()  # 2 of 4 tiles
        tensor(0.5000)
    """

    kept: torch.Tensor
    classes: torch.Tensor
    block: tuple[int, int]
    seqlen_q: int
    seqlen_k: int
    far: str
    skip: PerHead | None
    layout: Packed | None = None

    def __post_init__(self) -> None:
        for name, x, dtype in (("kept", self.kept, torch.bool), ("classes", self.classes, torch.int8)):
            expected, hint = f"{dtype} of four dimensions, on one device", "tilewise.select_tiles makes both"
            check_dense(f"Selected {name}", x, expected, hint)
            if x.dtype != dtype or x.ndim != 4 or x.device != self.kept.device:
                got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise InputError(f"Selected {name}", got=got, expected=expected, hint=hint)

    def density(self) -> torch.Tensor:
        """The share of tiles computed, of those that the mask does not hide.

        Returns:
            A float32 tensor of one number, on the device of q.
        """
        seen = (self.classes != EMPTY) | torch.zeros_like(self.kept)
        share: torch.Tensor = (seen & self.kept).sum() / seen.sum().clamp(min=1)
        return share

    def near(self, num_heads_q: int) -> Mask:
        """The pairs inside tiles that are taken."""
        places, (rows, columns) = self.places(), self.block

        def taken(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
            row = i - (places.seqlen_k(b) - places.seqlen_q(b))
            return self._read(self.kept, num_heads_q, b, h, row // e.lit(rows), j // e.lit(columns))

        return mask(taken, "taken tiles")

    def rest(self, num_heads_q: int) -> Mask:
        """The tiles that are not taken and of which nothing is hidden; j is a tile, and the last query at the last."""
        places, rows = self.places(), self.block[0]
        far = ~self.kept & (self.classes == FULL)

        def left(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
            row = i - (places.tiles_k(b) - places.seqlen_q(b))
            return self._read(far, num_heads_q, b, h, row // e.lit(rows), j)

        return mask(left, "tiles not taken")

    def layout_of_rest(self) -> Packed | None:
        """Where one key for each tile lies."""
        if self.layout is None:
            return None
        most_q = self.layout.bounds.rows_q
        return Packed(self.layout.cu_seqlens_q, _first_slots(self.layout.keys, self.block[1]), max_seqlen_q=most_q)

    def kept_apart(self) -> Selected:
        """With tensors that nobody else writes: the lengths of packed sequences, and classes that calls share."""
        layout = None if self.layout is None else copied(self.layout)
        return replace(self, classes=self.classes.clone(), layout=layout)

    def places(self) -> Places:
        return Places(self)

    def skip_of(self, call: Call) -> torch.Tensor | None:
        """`skip` as a call has it; raises InputError for another number of heads."""
        return (
            None if self.skip is None else _by_head("Sparge lam", _values(self.skip), call.num_heads_q, call.q.device)
        )

    def under(self, call: Call) -> Selected:
        """For a call of these sizes, whose mask may be another: a tile stands for its keys only if that hides none."""
        self.check(call)
        if self.far == "drop":
            return self
        classes = classes_of(call, self.block)
        kept = _of_heads(self.kept, classes, call) | (classes == PARTIAL)
        return replace(self, kept=kept, classes=classes)

    def check(self, call: Call) -> None:
        """Raise InputError unless it was made for calls of these sizes."""
        packed, (batch, heads) = self.layout is not None, self.kept.shape[:2]
        same = (self.seqlen_q, self.seqlen_k, packed) == (call.rows_q, call.rows_k, call.packed)
        same = same and (self.layout is None or _same_lengths(self.layout, call))
        if not same or heads not in (1, call.num_heads_kv, call.num_heads_q) or batch not in (1, call.batch):
            of = f"{'packed ' * packed}{self.seqlen_q} queries and {self.seqlen_k} keys, {heads} heads, batch {batch}"
            raise InputError(
                "select",
                got=f"tiles of {of}",
                expected="tiles that were selected for a call of the same sizes",
                hint="select_tiles once for each size, of packed sequences for the lengths of each",
            )

    def _read(self, table: torch.Tensor, heads: int, b: Expr, h: Expr, row: Expr, column: Expr) -> Expr:
        """Whether a tile's entry of a map is set."""
        batches, of_heads, *tiles = table.shape
        head = e.lit(0) if of_heads == 1 else h if of_heads == heads else h // (heads // of_heads)
        if self.layout is not None:
            first = (
                _first_slots(self.layout.cu_seqlens_q, self.block[0]),
                _first_slots(self.layout.keys, self.block[1]),
            )
            # the clamps change no slot: they prove that none lies outside
            row, column = (
                (slots[b] + x).clamp(0, size - 1) for slots, x, size in zip(first, (row, column), tiles, strict=True)
            )
        return e.cast(e.load(table, (b if batches > 1 else e.lit(0), head, row, column)), bool)


class Places:
    """Lengths of sequences and how many tiles of keys they have, as formulas read them."""

    def __init__(self, selected: Selected) -> None:
        self._selected = selected

    def seqlen_q(self, b: Expr) -> Any:
        layout = self._selected.layout
        return self._selected.seqlen_q if layout is None else _lengths(layout.cu_seqlens_q)[b]

    def seqlen_k(self, b: Expr) -> Any:
        layout = self._selected.layout
        return self._selected.seqlen_k if layout is None else _lengths(layout.keys)[b]

    def tiles_k(self, b: Expr) -> Any:
        """Of packed sequences, slots."""
        layout = self._selected.layout
        if layout is None:
            return int(self._selected.kept.shape[-1])
        return _lengths(_first_slots(layout.keys, self._selected.block[1]))[b]


def _same_lengths(layout: Packed, call: Call) -> bool:
    """Whether packed sequences are as long as they were, as far as is known without waiting for a GPU."""
    check_all_dense({"select layout cu_seqlens_q": layout.cu_seqlens_q, "select layout cu_seqlens_k": layout.keys})
    given = (layout.cu_seqlens_q, call.cu_seqlens_q), (layout.keys, call.cu_seqlens_k)
    for known, found in given:
        assert found is not None
        if known is found:
            continue
        if known.shape != found.shape:
            return False
        read = values_checked(found.device) and not (unreadable(known) or unreadable(found))
        if read and host_values(known) != host_values(found):
            return False
    return True


def _of_heads(kept: torch.Tensor, classes: torch.Tensor, call: Call) -> torch.Tensor:
    """A map with as many heads as the classes need: those of a group are alike where it has a head for all of them."""
    shared = kept.shape[1] == call.num_heads_kv < call.num_heads_q == classes.shape[1]
    return kept.repeat_interleave(call.group, 1) if shared else kept


def _first_slots(cu_seqlens: torch.Tensor, block: int) -> torch.Tensor:
    """Where tiles of sequences begin, int32 (batch + 1,)."""
    return cu_seqlens // block + _numbers(len(cu_seqlens), cu_seqlens.device)


@constant
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return cu_seqlens.diff()


# the choice ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pooled:
    """Classes of a call's tiles and scores of their means; self-similarity of tiles' rows (None where unused)."""

    classes: torch.Tensor
    scores: torch.Tensor
    of_rows: torch.Tensor | None
    of_columns: torch.Tensor | None

    def take(self, part: Prediction, call: Call, impl: str | None = None) -> torch.Tensor:
        """The tiles that a prediction takes, bool."""
        least, amount = _amounts(part, call)
        rows = Rows(self.scores, self.classes, self.of_rows, self.of_columns, least, amount, _kind(part))
        taken: torch.Tensor = TAKE(rows, impl)[0]
        return taken


def classes_of(call: Call, block: tuple[int, int]) -> torch.Tensor:
    """What a call's mask makes of its tiles, int8 (1 or batch, 1 or num_heads_q, tiles_q, tiles_k)."""
    return _classes(call.mask, call, block)


def pooled(call: Call, classes: torch.Tensor, block: tuple[int, int], alike: bool) -> Pooled:
    """Of a call, dense or packed. Codes that it has already may have sums, of which the means of tiles are made."""
    codes = call.codes
    if codes is not None and codes.q_sums is not None and codes.k_sums is not None:
        (of_q, of_k), sizes = (codes.q_sums, codes.k_sums), (call.rows_q, call.rows_k)
        each = (block[0] // rows_of_block("q"), block[1] // rows_of_block("k"))
        units = (of_q[1], of_k[1]) if alike else (None, None)
        sums = Sums(of_q[0], of_k[0], units[0], units[1], sizes, block, each, call.scale)
        s, *similar = TILE_SCORES(sums)
    else:
        means_q, *of_rows = _means(call.q, call.cu_seqlens_q, block[0], alike)
        means_k, *of_columns = _means(call.k, call.cu_seqlens_k, block[1], alike)
        s, similar = scores_of_means(means_q, means_k, call.scale), [*of_rows, *of_columns]
    return Pooled(classes, _scored(call, s, block), *(similar or (None, None)))


def choose_tiles(call: Call, select: Select, impl: str | None) -> Selected:
    """The tiles that a call, dense or packed, takes by a selection; `impl` is of the prediction."""
    classes = classes_of(call, select.block)
    for part in select.masks:
        check_mask(call, part, "select")
    taken = [(classes != EMPTY) & (_classes(part.bound, call, select.block) != EMPTY) for part in select.masks]
    if select.predictions and classes.numel():
        alike = any(max(_values(part.theta)) >= 0.0 for part in select.predictions)
        found = pooled(call, classes, select.block, alike)
        taken += [found.take(part, call, impl) for part in select.predictions]
    if select.far != "drop":
        taken.append(classes == PARTIAL)
    kept = taken[0] if taken else torch.zeros_like(classes, dtype=torch.bool)
    for more in taken[1:]:
        kept = kept | more
    if select.share_group and kept.shape[1] > call.num_heads_kv:
        kept = kept.view(kept.shape[0], call.num_heads_kv, call.group, *kept.shape[2:]).any(2)
        kept = _of_heads(kept, classes, call)
    layout = None
    if call.packed:
        assert call.cu_seqlens_q is not None
        layout = Packed(call.cu_seqlens_q, call.cu_seqlens_k, max_seqlen_q=call.bounds.rows_q)
    return Selected(kept, classes, select.block, call.rows_q, call.rows_k, select.far, select.skip, layout)


def sums_serve(call: Call, select: Select, scheme: Any) -> bool:
    """Whether means of the tiles that a selection predicts can be made of sums of the blocks that become codes."""
    if not isinstance(scheme, Scheme) or not select.predictions or call.packed or call.q.dtype not in ENCODABLE:
        return False
    whole = all(n % rows_of_block(side) == 0 for n, side in zip(select.block, "qk", strict=True))
    return whole and has_sums(scheme) and max(call.head_dim, call.head_dim_v) <= WIDEST_ENCODABLE


def _means(x: torch.Tensor, cu_seqlens: torch.Tensor | None, rows: int, alike: bool) -> tuple[torch.Tensor, ...]:
    """Means of tiles (batch, heads, tiles, dim), of packed sequences in slots of one, and how alike their rows are."""
    found = tile_means(x.detach(), rows, cu_seqlens=cu_seqlens, similarity=alike)
    return found if cu_seqlens is None else tuple(one[None] for one in found)


def _classes(bound: Bound | None, call: Call, block: tuple[int, int]) -> torch.Tensor:
    """The classes of a mask's tiles; of a call without pairs, without a look at the mask."""
    bound = bound if call.has_pairs else None
    if call.packed:
        return classify_pairs(bound, *_tiles(call, block), call.num_heads_q, *block)
    sizes = (call.rows_q, call.rows_k, call.batch, call.num_heads_q, *block, call.q.device)
    if bound is None or (not bound.tensors and call.signature is not None):
        return _known_classes(*(("", ()) if bound is None else (bound.text, bound.numbers)), *sizes)
    return _dense_classes(bound, *sizes)


@constant
def _known_classes(text: str, numbers: tuple[Any, ...], *sizes: Any) -> torch.Tensor:
    """The classes of a mask that captures nothing, or of none."""
    seqlen_q, seqlen_k, _, _, rows, columns, device = sizes
    if not text:
        return torch.full((1, 1, -(-seqlen_q // rows), -(-seqlen_k // columns)), FULL, dtype=torch.int8, device=device)
    return _dense_classes(Bound(text, (), numbers), *sizes)


def _dense_classes(
    bound: Bound, seqlen_q: int, seqlen_k: int, batch: int, heads: int, rows: int, columns: int, device: torch.device
) -> torch.Tensor:
    return classify(
        bound,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        heads=heads,
        block_m=rows,
        block_n=columns,
        device=device,
    )


def _tiles(call: Call, block: tuple[int, int]) -> tuple[Tiles, Tiles]:
    """Tiles of queries, at their places on the key axis, and of keys, of dense or packed sequences."""
    if not call.packed:
        of_q, of_k = (
            Tiles.of_one(call.rows_q, block[0], call.q.device),
            Tiles.of_one(call.rows_k, block[1], call.q.device),
        )
        return of_q.moved(call.rows_k - call.rows_q), of_k
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    of_q, of_k = (
        Tiles.of_packed(call.cu_seqlens_q, call.rows_q, block[0]),
        Tiles.of_packed(call.cu_seqlens_k, call.rows_k, block[1]),
    )
    return of_q.moved((_lengths(call.cu_seqlens_k) - _lengths(call.cu_seqlens_q))[of_q.b]), of_k


def _scored(call: Call, s: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What the score formula makes of scores of tiles, at their middles."""
    if call.score is None or not call.has_pairs:
        return s
    queries, keys, _ = paired(*_tiles(call, block))
    sequences = queries.b[:, None] if call.packed else torch.arange(s.shape[0], device=s.device).view(-1, 1, 1, 1)
    symbols = {
        "s": s,
        "b": sequences,
        "h": torch.arange(call.num_heads_q, device=s.device).view(-1, 1, 1),
        "i": queries.middle[:, None],
        "j": keys.middle,
    }
    tensors = [x.detach() for x in call.score.tensors]
    scored = evaluate([call.score.structure.root], symbols, tensors, call.score.numbers, s.dtype)[0]
    return scored.expand_as(s).contiguous()


def _amounts(part: Prediction, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(theta, how much) for each query head. No tile is more alike than 1, but for rounding."""
    name = "tau" if isinstance(part, Sparge) else "k" if isinstance(part, TopK) else "weight"
    theta = tuple(x if x < 1.0 else math.inf for x in _values(part.theta))
    given = (("theta", theta), (name, _values(getattr(part, name))))
    least, how_much = (
        _by_head(f"{type(part).__name__} {name}", x, call.num_heads_q, call.q.device) for name, x in given
    )
    return least, how_much


def _kind(part: Prediction) -> str:
    if isinstance(part, TopK):
        return "count" if part.counts else "share"
    return "mass" if isinstance(part, Sparge) else "weight"


def _values(x: float | tuple[float, ...]) -> tuple[float, ...]:
    return x if isinstance(x, tuple) else (x,)


@functools.lru_cache(maxsize=256)
def _by_head(name: str, values: tuple[float, ...], heads: int, device: torch.device) -> torch.Tensor:
    if len(values) not in (1, heads):
        raise InputError(
            name, got=f"{len(values)} numbers", expected=f"1, or {heads}", hint="one number for each query head"
        )
    return torch.tensor(values * (heads // len(values)), dtype=torch.float32, device=device)
