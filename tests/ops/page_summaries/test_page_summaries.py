"""Summaries of pages on the CPU: all of a request at once, or as tokens come, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.testing import page_summaries as checks
from tilewise.testing.page_selection import BY_NAME, CASES, SPARQ, PagesCase, make_inputs


@pytest.mark.parametrize("case", [*CASES, *SPARQ], ids=repr)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_equal_pytorch(case: PagesCase, impl: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        checks.check(case, dtype, impl)


@pytest.mark.parametrize("step", [1, 3, 8, 11])
def test_step_by_step(step: int) -> None:
    """Tokens come a few at a time: summaries are those of all at once."""
    given = make_inputs(BY_NAME["bounds"], torch.float32)
    k, v, layout = given["k"], given["v"], given["layout"]
    found, before = tw.PageSummaries.of(k, v, 8), torch.zeros_like(layout.seqlens_k)
    while bool((before < layout.seqlens_k).any()):
        now = torch.minimum(before + step, layout.seqlens_k)
        starts = torch.nn.functional.pad((now - before).cumsum(0), (1, 0)).to(torch.int32)
        tw.summarize_pages(k, v, found, tw.Paged(layout.block_table, now, starts), int(starts[-1]))
        before = now
    for name, x in found.tensors.items():
        assert torch.equal(x, getattr(layout.summaries, name))


def test_one_new_token_needs_no_starts() -> None:
    given = make_inputs(BY_NAME["bounds"], torch.float32)
    k, v, layout = given["k"], given["v"], given["layout"]
    newest = [int(layout.block_table[r, (n - 1) // 8]) for r, n in enumerate(BY_NAME["bounds"].lengths) if n]
    found = tw.PageSummaries.of(k, v, 8)
    has = layout.seqlens_k > 0  # a request without tokens has no new one
    tw.summarize_pages(k, v, found, tw.Paged(layout.block_table[has], layout.seqlens_k[has]))
    for name, x in found.tensors.items():
        assert torch.equal(x[newest], getattr(layout.summaries, name)[newest])
        assert int((x != 0).flatten(1).any(1).sum()) == len(newest)


def test_keys_that_are_no_numbers() -> None:
    """A page with NaN among its keys has NaN at both ends, so that it is read."""
    case = BY_NAME["bounds"]
    given = make_inputs(case, torch.float32)
    page = int(given["layout"].block_table[0, 2])
    given["k"][page, 3, 1, 5] = torch.nan
    starts = torch.tensor([0, 37, 42, 42, 106, 122], dtype=torch.int32)
    layout = tw.Paged(given["layout"].block_table, given["layout"].seqlens_k, starts)
    tw.summarize_pages(given["k"], given["v"], given["layout"].summaries, layout, 122)
    summaries = given["layout"].summaries
    for ends in (summaries.least, summaries.largest):
        assert bool(ends[page, 1, 5].isnan())
        assert not bool(ends[page, 0].isnan().any())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"k_pages": torch.zeros(4, 8, 2)}, "k_pages"),
        ({"v_pages": torch.zeros(4, 8, 2, 16, dtype=torch.int8)}, "v_pages"),
        ({"summaries": None}, "summaries"),
        ({"summaries": "others"}, "summaries least"),
        ({"summaries": "columns"}, "summaries columns"),
        ({"tokens": None}, "tokens"),
        ({"layout": "pair"}, "layout block_table"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], name: str) -> None:
    k = torch.zeros(4, 8, 2, 16)
    table, seqlens = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    layout = tw.Paged(table, seqlens, torch.tensor([0, 1, 2], dtype=torch.int32))
    whole = tw.PageSummaries.of(k, k)
    made = {
        "others": tw.PageSummaries.of(k[:3], k),
        "columns": replace(whole, columns=torch.zeros(4, 2, 16, 3)),
        "pair": replace(layout, block_table=(table[0], seqlens)),
    }
    given = {"k_pages": k, "v_pages": k, "summaries": whole, "layout": layout, "tokens": 2}
    given |= {key: made.get(value, value) if isinstance(value, str) else value for key, value in changes.items()}
    with pytest.raises(InputError, match=name):
        tw.summarize_pages(**given)


@pytest.mark.parametrize(("shape", "bits", "name"), [((4, 8, 2, 16), 2, "columns"), ((4, 5, 2, 16), 4, "page_size"),
                                                     ((4, 8, 2, 18), 8, "head_dim")])  # fmt: skip
def test_columns_that_cannot_be(shape: tuple[int, ...], bits: int, name: str) -> None:
    with pytest.raises(InputError, match=name):
        tw.PageSummaries.of(torch.zeros(shape), torch.zeros(shape), bits)


PAGES = torch.zeros(4, 8, 2, 16)


@pytest.mark.parametrize(
    ("k", "v", "bits", "name"),
    [
        ([1], PAGES, None, "k_pages"),
        (PAGES, PAGES[0], None, "v_pages"),
        (PAGES.to(torch.int8), PAGES, None, "k_pages"),
        (PAGES, PAGES, 8.0, "columns"),
        (PAGES, PAGES, torch.ones(2), "columns"),
    ],
)
def test_pages_and_bits_that_are_none(k: Any, v: Any, bits: Any, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: got"):
        tw.PageSummaries.of(k, v, bits)
