"""Requests of which neighbours begin alike, in pages that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import tilewise as tw
from tilewise.testing.budgets import Expectation, expected
from tilewise.testing.case import Case
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting, within


class Batch(NamedTuple):
    """A batch for `tilewise.attention`, and how it must come out."""

    q: torch.Tensor  # (batch, seqlen_q, heads, dim)
    k: torch.Tensor
    v: torch.Tensor
    arguments: dict[str, Any]
    expect: Callable[[], Expectation]  # in float64, with all scores: not for who does not ask

    @property
    def want(self) -> Expectation:
        return self.expect()


def alike(
    setting: Setting, case: Case, common: Sequence[int], page_size: int = 16, *, flat: bool = False, seed: int = 0
) -> Batch:
    """The requests of a packed case of alike many queries; `common` are how many first tokens of each are those of the
    one before. The layout shares prefixes.
    """
    assert case.packed is not None
    exact, plain = (make_inputs(case, setting.dtype, setting.device, exact=exact) for exact in (True, False))
    for inputs in (exact, plain):
        _copy_prefixes(inputs, common)
    pool = paged(plain, page_size, flat=flat, seed=seed, common=common)
    arguments = plain.arguments() | {"layout": replace(pool.layout, cu_seqlens_q=None, share_prefixes=True)}
    del arguments["dropout"]
    batch = len(case.packed)
    q = plain.q.detach().view(batch, -1, *plain.q.shape[1:])

    def expect() -> Expectation:
        want = expected(exact, plain, setting.dtype)
        values = want.values | {
            "o": want.values["o"].view(batch, q.shape[1], *want.values["o"].shape[1:]),
            "lse": want.values["lse"].view(case.heads_q, batch, -1).transpose(0, 1),
        }
        return Expectation(values, want.allowed)

    return Batch(q, pool.k, pool.v, arguments, expect)


def _copy_prefixes(inputs: Inputs, common: Sequence[int]) -> None:
    lengths = [keys for _, keys in inputs.case.lengths]
    start = 0
    with torch.no_grad():
        for r, keys in enumerate(lengths):
            if r > 0:
                n = min(common[r], *lengths[r - 1 : r + 1])
                for x in (inputs.k, inputs.v):
                    x[start : start + n] = x[start - lengths[r - 1] :][:n]
            start += keys


def shared_prefixes_hold_the_keys(
    setting: Setting, case: Case, common: Sequence[int], page_size: int = 16, *, flat: bool = False
) -> None:
    """What requests share in pages, and may compute once, gives what the keys of each do."""
    batch = alike(setting, case, common, page_size, flat=flat)
    with torch.no_grad():
        o, lse = tw.attention_with_lse(batch.q, batch.k, batch.v, impl=setting.impl, **batch.arguments)
    within({"o": o, "lse": lse}, batch.want)
