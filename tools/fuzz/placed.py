"""Where queries, keys and values of a case lie: dense, packed or in pages; and what of them is one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

import tilewise as tw
from tools.fuzz.case import Tensors
from tools.fuzz.draw import MEMORY, PAGE_SIZES, Draw

BATCHES = (0, *(1, 2, 3, 5) * 6)
Sequence3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Heads:
    """Sizes that decide which kernels are compiled."""

    dim: int
    dim_v: int
    kv: int
    group: int

    @property
    def q(self) -> int:
        """How many heads queries have."""
        return self.kv * self.group

    @property
    def text(self) -> str:
        """As a person reads it."""
        return f"heads {self.q}/{self.kv} of {self.dim},{self.dim_v}"


@dataclass
class Placed:
    """`inputs` are q, k, v (of pages: the pools), `layout` None for dense ones. `sequences` are the parts of such."""

    text: str
    inputs: Tensors
    layout: tw.Packed | tw.Paged | None
    lengths: list[tuple[int, int]]
    sequences: Callable[[Tensors], list[Sequence3]]
    packed: bool
    page_size: int = 0
    tables: tuple[tuple[int, ...], ...] = ()

    @property
    def longest(self) -> int:
        """Of all sequences of keys, at least 1."""
        most = max([1, *(k for _, k in self.lengths)])
        return most if self.packed or self.layout is not None else max(most, self.inputs["k"].shape[1])


def heads(draw: Draw, same: bool = False) -> Heads:
    """Any; with `same` values are as wide as keys."""
    dim = draw.dim()
    dim_v = dim if same or draw.kernel_chance(0.6) else draw.dim()
    return Heads(dim, dim_v, draw.kernel((1, 1, 2, 3)), draw.kernel((1, 1, 2, 3, 7)))


def dense(draw: Draw, sizes: Heads, dtype: torch.dtype, batch: int | None = None) -> Placed:
    """(batch, rows, heads, dim), of one length."""
    batch = draw.one(BATCHES) if batch is None else batch
    rows_k = 0 if draw.chance(0.03) else draw.length()
    rows_q = rows_k if draw.chance(0.6) else draw.one((1, 1, 2, draw.length()))
    rows_q = 0 if draw.chance(0.02) else rows_q
    return in_rows(draw, sizes, dtype, (batch, rows_q, rows_k), MEMORY)


def in_rows(
    draw: Draw, sizes: Heads, dtype: torch.dtype, extents: tuple[int, int, int], memory: Sequence[str]
) -> Placed:
    """(batch, rows, heads, dim) of this batch, these rows of queries and of keys."""
    batch, rows_q, rows_k = extents
    inputs = {
        name: draw.rows((batch, rows, n, dim), dtype, draw.kernel(memory))
        for name, rows, n, dim in (
            ("q", rows_q, sizes.q, sizes.dim),
            ("k", rows_k, sizes.kv, sizes.dim),
            ("v", rows_k, sizes.kv, sizes.dim_v),
        )
    }
    return Placed(
        f"dense {batch} x {rows_q}, {rows_k}",
        inputs,
        None,
        [(rows_q, rows_k)] * batch,
        lambda x: [(x["q"][b], x["k"][b], x["v"][b]) for b in range(batch)],
        packed=False,
    )


def lengths(draw: Draw, few: bool, batch: int | None = None) -> list[tuple[int, int]]:
    """Of queries and keys for each sequence; some are empty."""
    found = []
    for _ in range(draw.one(BATCHES) if batch is None else batch):
        k = 0 if draw.chance(0.15) else draw.length()
        q = min(k, draw.one((0, 1, 2, 5))) if few else draw.one((k, k, 0, 1, min(k, draw.length()), draw.length()))
        found.append((q, k))
    return found


def packed(draw: Draw, sizes: Heads, dtype: torch.dtype) -> Placed:
    """(total, heads, dim), one sequence after another."""
    found = lengths(draw, few=draw.chance(0.3))
    first_q, first_k = (draw.sums([pair[n] for pair in found]) for n in (0, 1))
    starts = [(int(a), int(b)) for a, b in zip(first_q.tolist(), first_k.tolist(), strict=True)]
    inputs = {
        name: draw.rows((rows, n, dim), dtype, draw.kernel(MEMORY[:4]))
        for name, rows, n, dim in (
            ("q", starts[-1][0], sizes.q, sizes.dim),
            ("k", starts[-1][1], sizes.kv, sizes.dim),
            ("v", starts[-1][1], sizes.kv, sizes.dim_v),
        )
    }

    def sequences(x: Tensors) -> list[Sequence3]:
        return [(x["q"][a:c], x["k"][b:d], x["v"][b:d]) for (a, b), (c, d) in pairwise(starts)]

    return Placed(f"packed {found}", inputs, tw.Packed(first_q, first_k), found, sequences, packed=True)


def paged(
    draw: Draw,
    sizes: Heads,
    dtype: torch.dtype,
    *,
    shared: bool = False,
    finite: bool = False,
    few: bool | None = None,
    alike: bool = False,
) -> Placed:
    """Keys and values in a pool of pages, whose unused slots hold NaN unless `finite`; `shared` prefixes lie once, and
    with `alike` heads of values lie as those of keys.
    """
    size = draw.kernel(PAGE_SIZES if not draw.small else PAGE_SIZES[:9])
    equal = draw.chance(0.4)
    found = lengths(draw, few=draw.chance(0.5) if few is None else few)
    if shared:
        common = size * draw.one((1, 2, 3))
        found = [(1, common + k + 1) for _, k in lengths(draw, few=True, batch=draw.one((2, 3, 5)))]
    elif equal and found:
        found = [(found[0][0], max(k, 0)) for _, k in found]
    found = found or [(0, 0)]
    counts = [-(-k // size) for _, k in found]
    order = torch.randperm(sum(counts) + 3, generator=draw.generator).tolist()
    free = iter(order)
    tables = [[next(free) for _ in range(count)] for count in counts]
    if shared:
        tables = [tables[0][: common // size] + table[common // size :] for table in tables]
    pools = _pools(draw, sizes, dtype, len(order), size, alike)
    if not finite:
        _spoil(pools, found, tables, size)
    flat, wide = draw.chance(0.3) and not shared, max(counts) + draw.one((0, 1, 3))
    table: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    if flat:
        table = (draw.sums(counts), draw.ints([page for own in tables for page in own] + [10**6] * 2))
    else:
        filler = draw.one((-1, 10**6, 0))
        table = draw.ints([page for own in tables for page in own + [filler] * (wide - len(own))])
        table = table.reshape(len(tables), wide)
    one_length = len({q for q, _ in found}) == 1
    as_batch = one_length and (shared or draw.chance(0.7))
    total = sum(q for q, _ in found)
    lead = (len(found), found[0][0]) if as_batch else (total,)
    q = draw.rows((*lead, sizes.q, sizes.dim), dtype, draw.kernel(MEMORY[:4]))
    first_q = draw.sums([n for n, _ in found])
    layout = tw.Paged(
        table, draw.ints([k for _, k in found]), None if as_batch else first_q, share_prefixes=shared
    )  # fmt: skip
    starts = [int(n) for n in first_q.tolist()]

    def sequences(x: Tensors) -> list[Sequence3]:
        result = []
        for r, (rows, keys) in enumerate(found):
            at = torch.tensor(tables[r], dtype=torch.int64, device=x["q"].device)
            k, v = (x[name][at].flatten(0, 1)[:keys] for name in ("k", "v"))
            result.append((x["q"][r] if as_batch else x["q"][starts[r] : starts[r] + rows], k, v))
        return result

    text = (
        f"pages of {size}, {found}{' flat' if flat else ''}{' shared' if shared else ''}{'' if as_batch else ' packed'}"
    )
    own = tuple(tuple(table) for table in tables)
    return Placed(text, {"q": q, **pools}, layout, found, sequences, not as_batch, size, own)


def _pools(draw: Draw, sizes: Heads, dtype: torch.dtype, pages: int, size: int, alike: bool) -> Tensors:
    memory = [draw.kernel(("plain", "heads first", "padded")) for _ in range(2)]
    memory = memory[:1] * 2 if alike else memory
    dims = (sizes.dim, sizes.dim_v)
    pairs = zip(("k", "v"), dims, memory, strict=True)
    return {name: draw.rows((pages, size, sizes.kv, dim), dtype, kind) for name, dim, kind in pairs}


def _spoil(pools: Tensors, found: list[tuple[int, int]], tables: Sequence[Sequence[int]], size: int) -> None:
    """NaN in every slot that belongs to no token."""
    used = torch.zeros(pools["k"].shape[:2], dtype=torch.bool)
    for (_, keys), table in zip(found, tables, strict=True):
        for n, page in enumerate(table):
            used[page, : max(0, min(size, keys - n * size))] = True
    for pool in pools.values():
        pool[~used.to(pool.device)] = float("nan")
