"""Masks of documents in one row, for the named problems (`testing.cases`)."""

from __future__ import annotations

import tilewise as tw
from tilewise.testing import plain
from tilewise.testing.case import Case, Maker, Spelled


def document_window(case: Case, make: Maker) -> Spelled:
    ids = make.integers(0, 2, case.batch, case.seqlen_k).cumsum(-1) // 12
    formula = tw.causal & tw.window(20) & tw.document(ids)
    return Spelled(formula, plain.both(plain.window(20), plain.document(ids)))


def document(case: Case, make: Maker) -> Spelled:
    ids = make.integers(0, 3, max(k for _, k in case.lengths))  # in any order, not only runs
    return Spelled(tw.document(ids), plain.document(ids))


def ascending(case: Case, make: Maker) -> Spelled:
    ids = make.integers(0, 8, max(k for _, k in case.lengths)).eq(0).cumsum(-1)  # runs of some 8 positions
    return Spelled(tw.document(ids, ascending=True), plain.document(ids))


def causal_ascending(case: Case, make: Maker) -> Spelled:
    ids = make.integers(0, 20, case.batch, case.seqlen_k).eq(0).cumsum(-1)
    return Spelled(tw.causal & tw.document(ids, ascending=True), plain.both(plain.causal, plain.document(ids)))
