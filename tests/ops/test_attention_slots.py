"""Formulas read inside what they capture where sequences are short or empty, and where nobody owns a tile's slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import FormulaError
from tilewise.schedule.tilemap import Tiles, classify, classify_pairs
from tilewise.testing.slots import LENGTHS, Lengths, formulas, packed, rows

SELECTIONS = {
    "all": None,
    "half": tw.TopK(0.5),
    "narrow": tw.Select(tw.TopK(0.5), block=(16, 32)),
    "masks": tw.Select(tw.window(9), tw.sinks(3), block=32),
}


@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_sequences_are_as_alone(lengths: Lengths, select: str, impl: str) -> None:
    q, k, v = rows(lengths, torch.float64)
    mask, score = formulas(lengths)
    shared: dict[str, Any] = {"select": SELECTIONS[select], "impl": impl}
    got = tw.attention(q, k, v, layout=packed(lengths), mask=mask, score=score, **shared)
    at_q = at_k = 0
    for b, (queries, keys) in enumerate(lengths):
        alone = [x[None, at : at + n] for x, at, n in ((q, at_q, queries), (k, at_k, keys), (v, at_k, keys))]
        mask, score = formulas(lengths, only=b)
        want = tw.attention(*alone, mask=mask, score=score, **shared)
        torch.testing.assert_close(got[at_q : at_q + queries], want[0], rtol=1e-12, atol=1e-12)
        at_q, at_k = at_q + queries, at_k + keys


@pytest.mark.parametrize("select", [None, tw.TopK(0.5)], ids=["all", "half"])
def test_a_tensor_too_short_for_a_sequence_is_refused(select: Any) -> None:
    lengths = ((40, 40), (9, 41))
    q, k, v = rows(lengths, torch.float32)
    ids = torch.zeros(40, dtype=torch.int32)
    with pytest.raises(FormulaError, match="which reaches 0 to 40"):
        tw.attention(q, k, v, layout=packed(lengths), mask=tw.document(ids), select=select)


def test_nothing_is_read_at_0_that_is_not_there() -> None:
    """Where no sequence has both, kernels evaluate formulas at 0, and that is proved."""
    lengths = ((4, 0), (0, 4))
    q, k, v = rows(lengths, torch.float32)
    assert not tw.attention(q, k, v, layout=packed(lengths), mask=tw.document(torch.zeros(1, dtype=torch.int32))).any()
    with pytest.raises(FormulaError, match="which reaches 0 to 0"):
        tw.attention(q, k, v, layout=packed(lengths), mask=tw.document(torch.zeros(0, dtype=torch.int32)))


@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_classes_of_packed_tiles_are_each_sequences_own(lengths: Lengths, block: int) -> None:
    mask, _ = formulas(lengths)
    layout = packed(lengths)
    totals = [int(x[-1]) for x in (layout.cu_seqlens_q, layout.keys)]
    queries, keys = (
        Tiles.of_packed(cu, total, block) for cu, total in zip((layout.cu_seqlens_q, layout.keys), totals, strict=True)
    )
    shift = layout.keys.diff() - layout.cu_seqlens_q.diff()
    got = classify_pairs(mask.bound, queries.moved(shift[queries.b]), keys, 1, block, block)[0, 0]
    want = torch.zeros_like(got)
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        if not seqlen_q or not seqlen_k:
            continue
        of_one = classify(
            mask.bound, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, heads=1, block_m=block, block_n=block
        )[0, 0]
        at = [int(cu[b]) // block + b for cu in (layout.cu_seqlens_q, layout.keys)]
        want[at[0] : at[0] + of_one.shape[0], at[1] : at[1] + of_one.shape[1]] = of_one
    assert torch.equal(got, want)
