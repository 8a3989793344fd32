"""The keys and values of a case, laid out in pages of a pool, encoded too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tilewise.layouts import Paged
from tilewise.quant import ByChannel, Encoded, encode, encode_by_channel
from tilewise.testing.inputs import Inputs, cumulative


class Pool(NamedTuple):
    """k and v (num_pages, page_size, heads, dim) and where the requests' tokens lie in them."""

    k: torch.Tensor
    v: torch.Tensor
    layout: Paged


def paged(
    inputs: Inputs, page_size: int, *, flat: bool = False, seed: int = 0, common: Sequence[int] | None = None
) -> Pool:
    """Each sequence's keys in pages that stand in no order, among pages of nobody; every slot that holds no token is
    NaN. With `flat`, the block table is a pair (indptr, indices), with indices to spare. With `common`, the first
    tokens of each sequence, of which that many are those of the one before, lie in that one's pages where they fill
    them, or where the sequence ends in them.
    """
    case, device = inputs.case, inputs.q.device
    lengths = [k for _, k in case.lengths]
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    start = 0
    for r, count in enumerate(counts):
        if common is not None and r > 0:
            most = min(lengths[r - 1 : r + 1])
            whole = common[r] >= lengths[r] == most
            pages = counts[r] if whole else min(common[r], most) // page_size
            order[start : start + pages] = order[start - counts[r - 1] :][:pages]
        start += count
    pools = []
    for x in (inputs.k, inputs.v):
        rows = x.detach() if case.packed is not None else x.detach().flatten(0, 1)
        pool = x.new_full((len(order), page_size, *rows.shape[1:]), torch.nan)
        start = used = 0
        for n, count in zip(lengths, counts, strict=True):
            for page in range(count):
                row = page * page_size
                pool[order[used + page], : min(page_size, n - row)] = rows[
                    start + row : start + min(row + page_size, n)
                ]
            start, used = start + n, used + count
        pools.append(pool)
    ends = cumulative(counts, device)
    flat_table = torch.tensor(order, dtype=torch.int32, device=device)
    table = torch.full((len(lengths), max(counts, default=0) + 1), 2**30, dtype=torch.int32, device=device)
    for row, (start, count) in enumerate(zip(ends.tolist(), counts, strict=False)):
        table[row, :count] = flat_table[start : start + count]
    cu_seqlens_q = None if case.packed is None else cumulative([q for q, _ in case.packed], device)
    seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Pool(pools[0], pools[1], Paged((ends, flat_table) if flat else table, seqlens_k, cu_seqlens_q))


def encoded(x: torch.Tensor, kind: str) -> Encoded:
    """Pages (num_pages, page_size, heads, dim) as codes; a slot of NaN gets any codes, and NaN or infinity as scale."""
    found = encode(x, kind)
    unused = found.scale.isnan()
    generator = torch.Generator().manual_seed(0)
    data = found.data.view(torch.uint8)
    data[unused] = torch.randint(0, 256, data.shape, generator=generator).to(data)[unused]
    found.scale[unused & (torch.rand(unused.shape, generator=generator) < 0.5).to(unused.device)] = torch.inf
    return found


def by_channel(x: torch.Tensor, bits: int) -> ByChannel:
    """Pages as codes by channel, or where a slot holds NaN open, in rows that stand in no order. What is not read is
    any bytes, and NaN.
    """
    generator = torch.Generator().manual_seed(0)
    is_open = x.isnan().flatten(1).any(1).cpu()
    found = encode_by_channel(x, bits)
    found.data[is_open] = torch.randint(0, 256, found.data.shape, generator=generator).to(found.data)[is_open]
    count = int(is_open.sum())
    rows = torch.randperm(count + 2, generator=generator).to(torch.int32)
    place = -1 - torch.randint(0, count + 2, is_open.shape, generator=generator, dtype=torch.int32)
    place[is_open] = rows[:count]
    opened = x.new_full((count + 2, *x.shape[1:]), torch.nan)
    opened[rows[:count].to(x.device)] = x[is_open.to(x.device)]
    return replace(found, open=opened, place=place.to(x.device))


def read_by_channel(x: torch.Tensor, lengths: Sequence[int], page_size: int, bits: int) -> torch.Tensor:
    """Keys of sequences as they are read, float32: those of full pages decoded, and each sequence begins a page."""
    rows = torch.split(x.detach().flatten(0, -3), list(lengths))
    found = [row.float() for row in rows]
    for row, y in zip(rows, found, strict=True):
        whole = len(row) // page_size
        if whole:
            made = encode_by_channel(row[: whole * page_size].view(whole, page_size, *row.shape[1:]), bits)
            y[: whole * page_size] = made.keys(torch.arange(whole, device=x.device)).flatten(0, 1)
    return torch.cat(found).view(x.shape)
