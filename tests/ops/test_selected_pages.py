"""`attention(select=TopPages(...))` on the CPU: against an oracle that reads pages one by one, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.quant import encode
from tilewise.testing import page_selection as cases
from tilewise.testing.page_selection import BY_NAME, CASES, SPARQ, PagesCase


@pytest.mark.parametrize("case", [*CASES, *SPARQ], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_reading_what_is_chosen(case: PagesCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype)


@pytest.mark.parametrize("select", [tw.TopPages(64), tw.TopPages(64, far="summary"), tw.SparQ(4, 64)], ids=repr)
def test_all_of_it_is_plain_attention(select: tw.TopPages | tw.SparQ) -> None:
    given = cases.make_inputs(BY_NAME["all"], torch.float32)
    torch.testing.assert_close(tw.attention(**given, select=select), tw.attention(**given))


def test_what_is_not_read_does_not_matter() -> None:
    """Pages that are dropped may hold anything."""
    case = BY_NAME["bounds"]
    given = cases.make_inputs(case, torch.float32)
    want = tw.attention(**given, select=case.select)
    layout = given["layout"]
    row = given["q"][0, 0]
    pages = layout.block_table[0, :5].long()
    for head in range(2):
        ends = [x[pages, head].double() for x in (layout.summaries.least, layout.summaries.largest)]
        read = cases.chosen(tw.TopPages(3), row[2 * head : 2 * head + 2].double(), *ends)
        for n in set(range(5)) - set(read):
            given["k"][pages[n], :, head] = torch.nan
            given["v"][pages[n], :, head] = torch.nan
    assert torch.equal(tw.attention(**given, select=case.select)[0], want[0])


def test_a_summary_is_nearer_than_nothing() -> None:
    """Where the tokens of a page are alike, their means stand for them well."""
    torch.manual_seed(0)
    k, v = (torch.randn(64, 1, 2, 32).expand(64, 16, 2, 32) + 0.05 * torch.randn(64, 16, 2, 32) for _ in range(2))
    k, v, q = k.contiguous(), v.contiguous(), torch.randn(1, 1, 4, 32)
    table, seqlens = torch.arange(64, dtype=torch.int32)[None], torch.tensor([1024], dtype=torch.int32)
    summaries = tw.PageSummaries.of(k, v)
    starts = torch.tensor([0, 1024], dtype=torch.int32)
    tw.summarize_pages(k, v, summaries, tw.Paged(table, seqlens, starts), 1024)
    layout = tw.Paged(table, seqlens, summaries=summaries)
    want = tw.attention(q, k, v, layout=layout)
    off = {
        far: float((tw.attention(q, k, v, layout=layout, select=tw.TopPages(8, far=far)) - want).abs().sum())
        for far in ("drop", "summary")
    }
    assert off["summary"] <= 0.1 * off["drop"]


def test_the_mean_of_values_makes_up_for_what_is_not_read() -> None:
    """Where weights are spread over many tokens: what SparQ says of compensation."""
    torch.manual_seed(0)
    case = cases.PagesCase("spread", tw.SparQ(16, 8), lengths=(512,), dim=32, dim_v=32)
    given = cases.make_inputs(case, torch.float32)
    given["q"] = 0.1 * given["q"]
    given["v"] += 1.0
    layout = given["layout"]
    starts = torch.tensor([0, 512], dtype=torch.int32)
    tw.summarize_pages(given["k"], given["v"], layout.summaries, replace(layout, cu_seqlens_q=starts), 512)
    want = tw.attention(**given)
    off = [
        float((tw.attention(**given, select=tw.SparQ(16, 8, compensate=yes)) - want).norm() / want.norm())
        for yes in (True, False)
    ]
    assert off[0] <= 0.2 * off[1]


def test_why_is_of_the_pages_that_are_read() -> None:
    given = cases.make_inputs(BY_NAME["bounds"], torch.float32)
    assert tw.why(**given, select=BY_NAME["bounds"].select).chosen == "cpu_tiled"


def _inputs() -> dict[str, Any]:
    return cases.make_inputs(BY_NAME["bounds"], torch.float32)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (lambda given: {"layout": replace(given["layout"], summaries=None)}, "layout"),
        (lambda given: {"layout": None}, "layout"),
        (lambda given: {"mask": tw.window(4)}, "mask"),
        (lambda given: {"score": tw.alibi(torch.ones(4))}, "score"),
        (lambda given: {"dropout": 0.5}, "dropout"),
        (lambda given: {"quantize": tw.Sage2()}, "quantize"),
        (lambda given: {"batch_invariant": True}, "batch_invariant"),
        (lambda given: {"q": given["q"].requires_grad_()}, "select"),
        (lambda given: {"k": encode(given["k"].nan_to_num(), "int8")}, "k_pages"),
        (lambda given: {"v": given["v"].transpose(1, 2).contiguous().transpose(1, 2)}, "v"),
    ],
)
def test_what_is_refused(changes: Any, name: str) -> None:
    given = _inputs()
    given |= changes(given)
    with pytest.raises(InputError, match=name):
        tw.attention(**given, select=tw.TopPages(3))


@pytest.mark.parametrize(
    "wrong",
    [{"pages": 0}, {"pages": 2.0}, {"pages": 3, "first": 3}, {"pages": 3, "local": 0}, {"pages": 3, "by": "max"},
     {"pages": 3, "far": "summary2"}],
)  # fmt: skip
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="TopPages"):
        tw.TopPages(**wrong)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"keys": True}, {"local": 0}, {"local": 9}])
def test_wrong_numbers_of_sparq(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="SparQ"):
        tw.SparQ(**({"rank": 4, "keys": 8} | wrong))


def test_what_sparq_does_not_go_with() -> None:
    given = _inputs()
    with pytest.raises(InputError, match="SparQ rank"):
        tw.attention(**given, select=tw.SparQ(17, 8))
    with pytest.raises(InputError, match="score"):
        tw.attention(**given, select=tw.SparQ(4, 8), score=tw.softcap(5.0))
    given["layout"] = replace(given["layout"], summaries=replace(given["layout"].summaries, columns=None))
    with pytest.raises(InputError, match="columns"):
        tw.attention(**given, select=tw.SparQ(4, 8))


def _pool(tokens: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, v, a table, lengths) of one request."""
    k, v = (torch.randn(-(-tokens // size), size, 2, 8) for _ in range(2))
    return k, v, torch.arange(len(k), dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32)


def _summarized(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> tw.Paged:
    summaries = tw.PageSummaries.of(k, v, columns=8)
    starts = torch.tensor([0, int(lengths[0])], dtype=torch.int32)
    tw.summarize_pages(k, v, summaries, tw.Paged(table, lengths, starts), int(lengths[0]))
    return tw.Paged(table, lengths, summaries=summaries)


@pytest.mark.parametrize("select", [tw.SparQ(8, 4), tw.TopPages(2), tw.TopPages(2, far="summary")], ids=repr)
def test_no_row_of_a_step_sees_later_values(select: tw.SparQ | tw.TopPages) -> None:
    """Nor in what stands for what is not read: the mean of its last page is of later tokens, too."""
    (k, v, table, lengths), q = _pool(14), torch.randn(1, 3, 4, 8)
    found = []
    for value in (0.0, 1000.0):
        v[3, 1] = value  # the newest token, which the last row alone sees
        layout = _summarized(k, v, table, lengths)
        found.append(tw.attention(q, k, v, layout=layout, select=select, mask=tw.causal))
    assert torch.equal(found[0][:, :2], found[1][:, :2])
    assert not torch.equal(found[0][:, 2], found[1][:, 2])


def test_sinks_are_checked() -> None:
    (k, v, table, lengths), q = _pool(16), torch.randn(1, 1, 4, 8)
    layout = _summarized(k, v, table, lengths)
    for sink in (torch.zeros(1), torch.zeros(2, 4), torch.zeros(4, dtype=torch.int64), 1.0):
        with pytest.raises(InputError, match="sink"):
            tw.attention(q, k, v, layout=layout, select=tw.TopPages(2), sink=sink)
    with pytest.raises(InputError, match="gradients"):
        tw.attention(q, k, v, layout=layout, select=tw.TopPages(2), sink=torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize("select", [tw.SparQ(8, 4), tw.TopPages(2), tw.TopPages(2, far="summary")], ids=repr)
def test_no_queries(select: tw.SparQ | tw.TopPages) -> None:
    k, v, table, lengths = _pool(16)
    summaries = _summarized(k, v, table, lengths).summaries
    none, starts = torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for q, layout in (
        (torch.randn(0, 1, 4, 8), tw.Paged(table[:0], none, summaries=summaries)),
        (torch.randn(1, 0, 4, 8), tw.Paged(table, lengths, summaries=summaries)),
        (torch.randn(0, 4, 8), tw.Paged(table, lengths, starts, summaries=summaries)),
    ):
        assert tw.attention(q, k, v, layout=layout, select=select).shape == q.shape


def test_one_head_may_have_any_stride() -> None:
    k, v = torch.randn(8, 4, 1, 8), torch.randn(8, 1, 4, 8).transpose(1, 2)
    table, lengths = torch.arange(8, dtype=torch.int32)[None], torch.tensor([32], dtype=torch.int32)
    layout, q = _summarized(k, v, table, lengths), torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(
        tw.attention(q, k, v, layout=layout, select=tw.TopPages(8)), tw.attention(q, k, v, layout=layout)
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("select", [tw.TopPages(2, far="summary"), tw.SparQ(4, 5)], ids=repr)
def test_what_stands_for_the_rest_compiles_whole(select: tw.TopPages | tw.SparQ, dynamic: bool) -> None:
    (k, v, table, lengths), q = _pool(16), torch.randn(1, 1, 4, 8)
    layout = _summarized(k, v, table, lengths)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, layout=layout, select=select)

    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=dynamic)
        torch.testing.assert_close(compiled(q), attend(q))


def test_more_new_tokens_than_a_request_has_touch_no_other_page() -> None:
    k = torch.randn(8, 4, 1, 8)
    table, lengths = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([2, 2], dtype=torch.int32)
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    for impl in ("cpu", "reference"):
        summaries = tw.PageSummaries.of(k, k)
        tw.summarize_pages(k, k, summaries, tw.Paged(table, lengths, starts), 18, impl=impl)
        assert summaries.k_mean.abs().sum((1, 2)).nonzero().flatten().tolist() == [0, 4]
