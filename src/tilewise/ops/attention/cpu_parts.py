"""What the CPU's attention is divided into: sequences, runs of tiles, and the hidden columns of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tilewise.ops.attention.problem import Call, requests, sequences

MAX_RUN = 8  # key tiles taken in one matmul


def parts_of(
    call: Call, apart: bool = False, only: Iterable[int] | None = None
) -> Iterator[tuple[Call, slice | None, slice | None]]:
    """The call itself, or one dense call of batch 1 for each packed sequence or paged request (`apart`, for each
    element of a dense batch too), with its rows of q (or of the batch) and of k; formulas see its batch index as `b`.
    Of a paged call these requests `only`.
    """
    if call.pages is not None:
        for b in range(call.batch) if only is None else only:
            (part, rows) = _request(call, b)
            if part.rows_q:
                yield part, rows, None
        return
    if not call.packed:
        if apart:
            for b in range(call.batch if call.rows_q else 0):
                k, v = call.k[b : b + 1].clone(), call.v[b : b + 1].clone()
                yield replace(call, q=call.q[b : b + 1], k=k, v=v, first_batch=b), slice(b, b + 1), None
        elif call.batch and call.rows_q:
            yield call, None, None
        return
    for b, rows, keys in sequences(call):
        if rows.stop > rows.start:
            q, k, v = call.q[None, rows], call.k[None, keys], call.v[None, keys]
            if apart:  # products of libraries may depend on where memory starts
                k, v = k.clone(), v.clone()
            yield replace(call, q=q, k=k, v=v, cu_seqlens_q=None, cu_seqlens_k=None, first_batch=b), rows, keys


def _request(call: Call, b: int) -> tuple[Call, slice]:
    """(a dense call of one request of a paged one, its rows of q)."""
    assert call.pages is not None
    table, first, seqlens = call.pages
    some = slice(b, b + 1)
    if first is None:
        pages = call.pages._replace(table=table[some], seqlens=seqlens[some])
    else:
        pages = call.pages._replace(first=first[b : b + 2], seqlens=seqlens[some])
    packed = call.cu_seqlens_q is not None
    starts = call.cu_seqlens_q[b : b + 2] if call.cu_seqlens_q is not None else None
    q = call.q if packed else call.q[some]
    ((part, rows),) = requests(replace(call, q=q, pages=pages, cu_seqlens_q=starts))
    return replace(part, first_batch=b), rows if packed else some


def runs_of(tiles: Iterable[int]) -> list[range]:
    """Ascending numbers of tiles as ranges of neighbours, up to MAX_RUN of them."""
    runs: list[range] = []
    for n in tiles:
        if runs and runs[-1].stop == n and len(runs[-1]) < MAX_RUN:
            runs[-1] = range(runs[-1].start, n + 1)
        else:
            runs.append(range(n, n + 1))
    return runs


def fill(parts: list[torch.Tensor], kept: torch.Tensor, value: float) -> None:
    """masked_fill_(~kept, value) of columns in `parts`, by bit operations, which PyTorch vectorises: a tenth of the
    time on a CPU.
    """
    whole = torch.int64 if parts[0].dtype == torch.float64 else torch.int32
    widths = [x.shape[-1] for x in parts]
    kept = kept.broadcast_to((*kept.shape[:-1], sum(widths)))
    bits = kept.to(whole).neg_()
    filling = bits.bitwise_not() & torch.tensor(value, dtype=parts[0].dtype, device="cpu").view(whole)
    for x, keep, fill in zip(parts, torch.split(bits, widths, -1), torch.split(filling, widths, -1), strict=True):
        x.view(whole).bitwise_and_(keep).bitwise_or_(fill)
