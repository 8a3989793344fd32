"""What is declared of lengths: checked where values are read, and enough where nothing can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import FormulaError, InputError
from tilewise.ops.attention import lengths as module
from tilewise.ops.attention.lengths import longest, reads
from tilewise.ops.attention.paged_rows import reads as reads_of_pages
from tilewise.ops.attention.paged_rows import rows_of_call
from tilewise.ops.attention.problem import make_call

CU = torch.tensor([0, 5, 24], dtype=torch.int32)
Q = torch.zeros(24, 2, 8)
TABLE, LENGTHS = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([9, 5], dtype=torch.int32)
POOL = torch.zeros(6, 4, 2, 8)


def over_pages(**declared: Any) -> tw.Paged:
    return tw.Paged(TABLE, LENGTHS, **declared)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (lambda: tw.Packed(CU, max_seqlen_k=18), "max_seqlen_q: got 18, and a sequence of 19"),
        (lambda: tw.Packed(CU, CU.clone(), max_seqlen_k=18), "max_seqlen_k: got 18, and a sequence of 19"),
        (lambda: tw.Packed(CU, CU.clone(), max_seqlen_q=3), "max_seqlen_q: got 3"),
        (lambda: tw.Packed(CU, max_seqlen_q=-1), "max_seqlen_q: got -1"),
        (lambda: tw.Packed(CU, max_seqlen_k=True), "max_seqlen_k: got True"),
        (lambda: tw.Packed(CU, max_seqlen_k=torch.tensor(19)), "max_seqlen_k: got tensor"),
    ],
)
def test_bounds_that_do_not_hold(layout: Callable[[], tw.Packed], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tw.attention(Q, Q, Q, layout=layout())


def test_a_bound_of_requests_that_does_not_hold() -> None:
    with pytest.raises(InputError, match="max_seqlen_k: got 8, and a sequence of 9"):
        tw.attention(torch.zeros(2, 1, 2, 8), POOL, POOL, layout=over_pages(max_seqlen_k=8))


def test_bounds_change_no_bit() -> None:
    x = torch.randn(3, 24, 2, 8)
    for mask in (tw.causal, tw.dilated(2)):
        want = tw.attention(*x, layout=tw.Packed(CU), mask=mask)
        assert torch.equal(tw.attention(*x, layout=tw.Packed(CU, max_seqlen_q=19, max_seqlen_k=20), mask=mask), want)


def test_the_longest_is_what_is_declared_or_the_total() -> None:
    assert longest(make_call(Q, Q, Q, layout=tw.Packed(CU)), of_keys=True) == 24
    assert longest(make_call(Q, Q, Q, layout=tw.Packed(CU, max_seqlen_k=19)), of_keys=False) == 19, "they are the same"
    apart = make_call(Q, Q, Q, layout=tw.Packed(CU, CU.clone(), max_seqlen_k=19))
    assert (longest(apart, of_keys=False), longest(apart, of_keys=True)) == (24, 19)
    assert longest(make_call(Q, Q, Q, layout=tw.Packed(CU, max_seqlen_k=99)), of_keys=True) == 24


@pytest.mark.parametrize(
    ("size", "index", "declared", "read"),
    [
        (24, "j", {}, False),
        (24, "i", {}, False),  # as many queries as keys: no query stands before the first key
        (19, "j", {}, True),
        (19, "j", {"max_seqlen_k": 19}, False),
        (19, "i", {"max_seqlen_q": 19}, False),
    ],
)
def test_shapes_and_bounds_spare_reading(size: int, index: str, declared: dict[str, int], read: bool) -> None:
    bias = torch.zeros(size)
    score = (lambda s, b, h, i, j: s + bias[i]) if index == "i" else (lambda s, b, h, i, j: s + bias[j])
    assert bool(reads(make_call(Q, Q, Q, layout=tw.Packed(CU, **declared), score=score))) is read


def test_values_that_decide_over_an_index_are_read_each_time() -> None:
    table, places = torch.zeros(3), torch.zeros(24, dtype=torch.int64)

    def call() -> Any:
        return make_call(Q[None], Q[None], Q[None], score=lambda s, b, h, i, j: s + table[places[j]])

    assert "values of a captured tensor" in reads(call())[0]
    places.data[3] = 3
    with pytest.raises(FormulaError, match="reaches 0 to 3"):
        call()
    clamped = make_call(Q[None], Q[None], Q[None], score=lambda s, b, h, i, j: s + table[places[j].clamp(0, 2)])
    assert not reads(clamped)


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have to be is refused by name."""
    bias = torch.zeros(19)
    for name in ("host_values", "steps"):
        monkeypatch.setattr(module, name, lambda x: None)
    monkeypatch.setattr(module, "being_captured", lambda device: True)
    with pytest.raises(FormulaError, match="while a CUDA graph is captured"):
        make_call(Q, Q, Q, layout=tw.Packed(CU), score=lambda s, b, h, i, j: s + bias[j])
    make_call(Q, Q, Q, layout=tw.Packed(CU, max_seqlen_k=19), score=lambda s, b, h, i, j: s + bias[j])
    places, table = torch.zeros(24, dtype=torch.int64), torch.zeros(3)
    monkeypatch.setattr("tilewise.formula.check.host_range", lambda x: None)
    monkeypatch.setattr("tilewise.formula.check.being_captured", lambda device: True)
    with pytest.raises(FormulaError, match="an index or a divisor read from a captured tensor"):
        make_call(Q[None], Q[None], Q[None], score=lambda s, b, h, i, j: s + table[places[j]])


def test_a_bound_spares_the_lengths_of_rows_out_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 1, 2, 8)
    assert reads_of_pages(over_pages())
    assert not reads_of_pages(over_pages(max_seqlen_k=10))
    rows = rows_of_call(q, POOL, POOL, over_pages(max_seqlen_k=10))
    assert len(rows.k) == 14, "a CPU reads"
    monkeypatch.setattr("tilewise.ops.attention.paged_rows.host_values", lambda x: None)
    assert len(rows_of_call(q, POOL, POOL, over_pages(max_seqlen_k=10)).k) == 20
    assert len(rows_of_call(q, POOL, POOL, over_pages()).k) == 24
    assert replace(over_pages(), max_seqlen_k=3).bounds.rows_k == 3
