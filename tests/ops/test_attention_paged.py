"""Keys and values in pages: what holds on the CPU, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core import readback
from tilewise.core.errors import FormulaError, InputError, UnsupportedError
from tilewise.ops.attention import lengths as found_lengths
from tilewise.ops.attention import problem
from tilewise.ops.attention.triton_paged import rows_of_tile
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CPU_CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting, run

ROWS = ("cpu_tiled", "reference")
CASES = [case for case in CPU_CASES if case.memory == "dense" and not case.dropout and case.pairs <= 100_000]


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("case", [case for case in CASES if case.packed or case.mask], ids=repr)
@pytest.mark.parametrize("impl", ROWS)
def test_pages_hold_the_keys(impl: str, case: Case, page_size: int) -> None:
    if impl == "reference" and page_size != 5:
        page_size = 64
    properties.pages_hold_the_keys(Setting(impl), case, page_size, flat=page_size == 5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=5),
    page_size=st.integers(1, 33),
    flat=st.booleans(),
    group=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_lengths(
    lengths: list[tuple[int, int]], page_size: int, flat: bool, group: int, dtype: torch.dtype
) -> None:
    case = Case("any", packed=tuple(lengths), heads_q=2 * group, mask=None, sink=group == 3)
    properties.pages_hold_the_keys(Setting("cpu_tiled", dtype), case, page_size, flat)


def test_no_requests() -> None:
    pool, none = torch.zeros(2, 4, 2, 8), torch.zeros(0, dtype=torch.int32)
    o, lse = tw.attention_with_lse(torch.zeros(0, 3, 2, 8), pool, pool, layout=tw.Paged(none.view(0, 1), none))
    assert o.shape == (0, 3, 2, 8)
    assert lse.shape == (0, 2, 3)


def test_requests_may_share_pages() -> None:
    case = Case("shared", batch=3, seqlen_q=4, seqlen_k=24)
    inputs = make_inputs(case, torch.float32)
    pool = paged(inputs, 8)
    assert isinstance(pool.layout.block_table, torch.Tensor)
    table = pool.layout.block_table.clone()
    table[:, :2] = table[:1, :2]
    with torch.no_grad():
        got = tw.attention(inputs.q, pool.k, pool.v, layout=tw.Paged(table, pool.layout.seqlens_k))
        k, v = (torch.cat([x[:1, :16].expand(3, -1, -1, -1), x[:, 16:]], 1) for x in (inputs.k, inputs.v))
        want = tw.attention(inputs.q, k, v)
    torch.testing.assert_close(got, want)


def test_the_pool_may_have_any_strides() -> None:
    inputs = make_inputs(Case("strides", seqlen_q=3, seqlen_k=20, head_dim=8, head_dim_v=8), torch.float32)
    pool = paged(inputs, 4)
    joint = torch.stack([pool.k, pool.v], 1).transpose(2, 3).contiguous()  # (pages, 2, heads, page_size, dim)
    with torch.no_grad():
        want = tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout)
        got = tw.attention(inputs.q, joint[:, 0].transpose(1, 2), joint[:, 1].transpose(1, 2), layout=pool.layout)
    assert torch.equal(got, want)


def test_gradients_go_through_the_reference_only() -> None:
    case = Case("gradients", batch=2, seqlen_q=4, seqlen_k=12)
    inputs = make_inputs(case, torch.float64)
    pool = paged(inputs, 4)
    with pytest.raises(UnsupportedError, match="no gradients with paged keys"):
        tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout)
    o = tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout, impl="reference")
    (got,) = torch.autograd.grad(o, inputs.q, inputs.do)
    torch.testing.assert_close(got, run(Setting("reference", torch.float64), inputs)["dq"])


def test_compiled() -> None:
    inputs = make_inputs(Case("compiled", seqlen_q=3, seqlen_k=20), torch.float32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *layout: torch.Tensor) -> torch.Tensor:
        table, seqlens = (layout[:2], layout[2]) if len(layout) == 3 else (layout[0], layout[1])
        return tw.attention(q, k, v, mask=tw.causal, layout=tw.Paged(table, seqlens))  # type: ignore[arg-type]

    for flat in (False, True):
        pool = paged(inputs, 8, flat=flat)
        table = pool.layout.block_table
        tensors = (*table, pool.layout.seqlens_k) if isinstance(table, tuple) else (table, pool.layout.seqlens_k)
        with torch.no_grad():
            got = torch.compile(attend, fullgraph=True, backend="aot_eager")(inputs.q, pool.k, pool.v, *tensors)
            want = attend(inputs.q, pool.k, pool.v, *tensors)
        assert torch.equal(got, want)


TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([8, 5], dtype=torch.int32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a page that is not there": ({"block_table": TABLE + 1}, r"block_table: got page 4 in request 1; expected 0 to 3"),
    "a negative page": ({"block_table": TABLE - 1}, r"block_table: got page -1 in request 0"),
    "too few pages": ({"seqlens_k": LENGTHS + 1}, r"seqlens_k: got 9 in request 0; expected 0 to 8: 2 pages of 4"),
    "a negative length": ({"seqlens_k": LENGTHS - 6}, r"seqlens_k: got -1 in request 1"),
    "another type": ({"block_table": TABLE.float()}, r"block_table: got torch.float32 .* a contiguous int32 or int64"),
    "lengths of another type": ({"seqlens_k": LENGTHS.short()}, r"seqlens_k: got torch.int16"),
    "a page of more bits": ({"block_table": TABLE.long() + 2**32}, r"block_table: got page 2147483647 in request 0"),
    "a length of more bits": ({"seqlens_k": LENGTHS.long() - 2**32}, r"seqlens_k: got -2147483648 in request 0"),
    "one length too few": ({"seqlens_k": LENGTHS[:1]}, r"seqlens_k: got shape \(1,\)"),
    "a list": ({"block_table": [[0, 1], [2, 3]]}, r"block_table: got list"),
    "a table of one dimension": ({"block_table": TABLE[0]}, r"block_table: got shape \(2,\)"),
    "indptr beyond the indices": (
        {"block_table": (torch.tensor([0, 2, 5], dtype=torch.int32), TABLE.flatten())},
        r"indptr: got 0 to 5; expected values that never fall, from 0 to at most 4",
    ),
    "falling indptr": (
        {"block_table": (torch.tensor([0, 3, 2], dtype=torch.int32), TABLE.flatten())},
        r"indptr: got 0 to 2; expected values that never fall",
    ),
    "queries of another batch": (
        {"block_table": TABLE[:1], "seqlens_k": LENGTHS[:1]},
        r"q: got batch 2; expected 1, the requests of the block table",
    ),
    "packed queries without a packed q": (
        {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)},
        r"q: got shape \(2, 1, 2, 8\); expected \(total, heads, dim\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    changes, message = WRONG[name]
    q, pool = torch.zeros(2, 1, 2, 8), torch.zeros(4, 4, 2, 8)
    arguments = {"block_table": TABLE, "seqlens_k": LENGTHS} | changes
    with pytest.raises(InputError, match=message):
        tw.attention(q, pool, pool, layout=tw.Paged(**arguments))


def test_refused_packed_queries() -> None:
    q, pool = torch.zeros(3, 2, 8), torch.zeros(4, 4, 2, 8)
    for ends, message in (([0, 3], r"cu_seqlens_q: got \(2,\); expected \(3,\)"), ([0, 1, 2], "expected from 0 to 3")):
        with pytest.raises(InputError, match=message):
            tw.attention(q, pool, pool, layout=tw.Paged(TABLE, LENGTHS, torch.tensor(ends, dtype=torch.int32)))


def test_refused_pools() -> None:
    q = torch.zeros(2, 1, 2, 8)
    for pool, message in (
        (torch.zeros(4, 0, 2, 8), "k: got pages of 0 tokens"),
        (torch.zeros(4, 2, 8), r"k: got shape \(4, 2, 8\); expected \(num_pages, page_size, heads, dim\)"),
        (torch.zeros(4, 4, 3, 8), "k: got 3 heads"),
    ):
        with pytest.raises(InputError, match=message):
            tw.attention(q, pool, pool, layout=tw.Paged(TABLE, LENGTHS))


def test_indices_that_shapes_prove_read_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of requests are looked at only where the largest that there is room for would leave a tensor."""
    pool = torch.randn(2, 6, 4, 2, 8)
    layout = tw.Paged(torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([9, 5], dtype=torch.int32))
    q = torch.randn(2, 1, 4, 8)
    looked = []

    def spy(x: torch.Tensor) -> Any:
        looked.append(x)
        return readback.host_values(x)

    monkeypatch.setattr(found_lengths, "host_values", spy)
    slopes, enough, few, too_few = torch.rand(4), torch.rand(12), torch.rand(9), torch.rand(8)
    for _ in range(2):
        problem.make_call(q, *pool, layout=layout, mask=tw.causal, score=tw.alibi(slopes))
        problem.make_call(q, *pool, layout=layout, score=lambda s, b, h, i, j: s + enough[j])
    assert not looked
    for n in (1, 2):
        problem.make_call(q, *pool, layout=layout, score=lambda s, b, h, i, j: s + few[j])
        assert len(looked) == n, "each time: lengths may change"
    with pytest.raises(FormulaError, match="reaches 0 to 8"):
        problem.make_call(q, *pool, layout=layout, score=lambda s, b, h, i, j: s + too_few[j])
    with pytest.raises(FormulaError, match="reaches 0 to 3"):
        problem.make_call(q, *pool, layout=layout, score=tw.alibi(slopes[:3]))


@pytest.mark.parametrize("packed", [False, True])
def test_tiles_have_the_rows_of_a_mean_request(packed: bool) -> None:
    pool = torch.zeros(4, 16, 2, 64)
    found = []
    for queries in (1, 4, 6, 16, 64):  # in groups of four
        ends = torch.arange(3, dtype=torch.int32) * queries if packed else None
        layout = tw.Paged(torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 64, dtype=torch.int32), ends)
        q = torch.zeros(*((2 * queries,) if packed else (2, queries)), 8, 64)
        call = problem.make_call(q, pool, pool, layout=layout)
        found.append((rows_of_tile(call), rows_of_tile(call, least=4, most=16)))
    assert found == [(16, 4), (16, 16), (32, 16), (64, 16), (64, 16)]
