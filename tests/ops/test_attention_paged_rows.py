"""Keys in pages that become rows: attention in few bits, and selections of tiles, are what they are of packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.ops.attention import paged_rows
from tilewise.testing.case import Case
from tilewise.testing.inputs import Inputs, cumulative, make_inputs
from tilewise.testing.paging import by_channel, encoded, paged

LENGTHS = ((5, 0), (0, 3), (70, 130), (64, 128), (1, 1), (9, 100))
CASE = Case("ragged", packed=LENGTHS, heads_q=4, heads_kv=2)
WAYS: dict[str, dict[str, Any]] = {
    "few bits": {"quantize": tw.Sage2(), "mask": tw.causal},
    "few bits, centred queries": {"quantize": tw.Sage2("int4")},
    "tiles": {"select": tw.Select(tw.TopK(2), block=(32, 16)), "mask": tw.causal},
    "tiles by mass, in few bits": {"select": tw.Select(tw.Sparge(0.4, 0.0), block=(64, 128)), "quantize": tw.Sage2()},
    "tiles and a summary": {"select": tw.Select(tw.TopK(1), block=(32, 16), far="summary")},
}


def in_rows(inputs: Inputs) -> tw.Packed:
    assert inputs.case.packed is not None
    of_q, of_k = ([lengths[side] for lengths in inputs.case.packed] for side in (0, 1))
    return tw.Packed(cumulative(of_q, inputs.q.device), cumulative(of_k, inputs.q.device))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("way", WAYS)
def test_same_bits_as_packed_rows(way: str, page_size: int) -> None:
    inputs = make_inputs(CASE, torch.bfloat16)
    with torch.no_grad():
        want = tw.attention_with_lse(inputs.q, inputs.k, inputs.v, layout=in_rows(inputs), **WAYS[way])
        for flat in (False, True):
            pool = paged(inputs, page_size, flat=flat)  # what holds no token is NaN
            found = tw.attention_with_lse(inputs.q, pool.k, pool.v, layout=pool.layout, **WAYS[way])
            assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_alike_many_queries(way: str) -> None:
    inputs = make_inputs(Case("batch", batch=3, seqlen_q=40, seqlen_k=130, heads_q=4, heads_kv=2), torch.float32)
    pool = paged(inputs, 16)
    with torch.no_grad():
        want = tw.attention_with_lse(inputs.q, inputs.k, inputs.v, **WAYS[way])
        found = tw.attention_with_lse(inputs.q, pool.k, pool.v, layout=pool.layout, **WAYS[way])
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=5),
    page_size=st.integers(1, 33),
    flat=st.booleans(),
)
def test_any_lengths(lengths: list[tuple[int, int]], page_size: int, flat: bool) -> None:
    inputs = make_inputs(Case("any", packed=tuple(lengths)), torch.float32)
    pool = paged(inputs, page_size, flat=flat)
    with torch.no_grad():
        want = tw.attention(inputs.q, inputs.k, inputs.v, layout=in_rows(inputs), quantize=tw.Sage2(), mask=tw.causal)
        found = tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout, quantize=tw.Sage2(), mask=tw.causal)
    assert torch.equal(found, want)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("way", ["few bits", "tiles"])
def test_lengths_that_cannot_be_read(way: str, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16, flat=flat)
    with torch.no_grad():
        want = tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout, **WAYS[way])
        rows = paged_rows.rows_of_call(inputs.q, pool.k, pool.v, pool.layout)
        monkeypatch.setattr(paged_rows, "host_values", lambda lengths: None)  # as inside a CUDA graph
        monkeypatch.setattr("tilewise.layout_checks.values_checked", lambda device: False)
        assert len(paged_rows.rows_of_call(inputs.q, pool.k, pool.v, pool.layout).k) > len(rows.k)
        found = tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout, **WAYS[way])
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_codes_are_decoded(kind: str) -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16)
    k, v = encoded(pool.k, kind), encoded(pool.v, kind)
    numbers = [tw.quant.decode(x) for x in (k, v)]
    with torch.no_grad():
        want = tw.attention(inputs.q, *numbers, layout=pool.layout, **WAYS["tiles"])
        found = tw.attention(inputs.q, k, v, layout=pool.layout, **WAYS["tiles"])
    assert torch.equal(found, want)


def test_gradients_reach_the_pages() -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16)
    leaves = [x.nan_to_num().requires_grad_() for x in (inputs.q.detach(), pool.k, pool.v)]
    o = tw.attention(*leaves, layout=pool.layout, **WAYS["tiles"])
    found = torch.autograd.grad(o, leaves, inputs.do)
    rows = [inputs.q, inputs.k, inputs.v]
    want = torch.autograd.grad(tw.attention(*rows, layout=in_rows(inputs), **WAYS["tiles"]), rows, inputs.do)
    torch.testing.assert_close(found[0], want[0])
    for got, right in zip(found[1:], want[1:], strict=True):
        rows_of = paged_rows.rows_of_call(inputs.q, got, got, pool.layout).k
        torch.testing.assert_close(rows_of, right)
        torch.testing.assert_close(got.sum(), right.sum())  # and nothing anywhere else


def test_a_choice_made_before_is_used() -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16)
    select = WAYS["tiles"]["select"]
    with torch.no_grad():
        chosen = tw.select_tiles(inputs.q, pool.k, select, mask=tw.causal, layout=pool.layout)
        want = tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout, **WAYS["tiles"])
        found = tw.attention(inputs.q, pool.k, pool.v, layout=pool.layout, mask=tw.causal, select=chosen)
    assert torch.equal(found, want)


def test_codes_of_requests() -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    want = tw.quantize_qkv(q, k, v, scheme=tw.Sage2(), layout=in_rows(inputs))
    found = tw.quantize_qkv(q, pool.k, pool.v, scheme=tw.Sage2(), layout=pool.layout)
    for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "k_mean", "q_bias"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name


def test_refused() -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16)
    with torch.no_grad():
        keys, values = by_channel(pool.k, 4), encoded(pool.v, "int8")
        with pytest.raises(InputError, match="keys by channel"):
            tw.attention(inputs.q, keys, values, layout=pool.layout, quantize=tw.Sage2())
        wrong = tw.Paged(torch.full((6, 9), 99, dtype=torch.int32), pool.layout.seqlens_k, pool.layout.cu_seqlens_q)
        with pytest.raises(InputError, match="block_table"):
            tw.attention(inputs.q, pool.k, pool.v, layout=wrong, quantize=tw.Sage2())


def test_a_graph_breaks_where_lengths_are_read() -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, layout=pool.layout, quantize=tw.Sage2()) + 1.0

    with torch.no_grad():
        want = run(inputs.q, pool.k, pool.v)
        assert torch.equal(torch.compile(run, backend="eager")(inputs.q, pool.k, pool.v), want)
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match="rows_of_call"):
            torch.compile(run, backend="eager", fullgraph=True)(inputs.q, pool.k, pool.v)


def test_why_names_who_runs_the_rows() -> None:
    inputs = make_inputs(CASE, torch.float32)
    pool = paged(inputs, 16)
    with torch.no_grad():
        assert tw.why(inputs.q, pool.k, pool.v, layout=pool.layout, quantize=tw.Sage2()).chosen == "cpu_codes"
        assert tw.why(inputs.q, pool.k, pool.v, layout=pool.layout, select=tw.TopK(2)).chosen == "cpu_tiled"
