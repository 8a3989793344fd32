"""FlashInfer's wrappers and functions against attention written out in float64, request by request."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters.dense import assert_close, dense
from tilewise.adapters import flashinfer as fi

LENGTHS = [(3, 17), (1, 1), (0, 6), (4, 4), (2, 33)]
WORKSPACE = torch.empty(1, dtype=torch.uint8)
HEADS, GROUP, DIM = 2, 3, 8
QO_HEADS = HEADS * GROUP


class Batch(NamedTuple):
    """Requests with their keys in pages, in both layouts, and packed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor  # (pages, 2, page_size, heads, dim)
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # indptr, indices, last_page_len
    lengths: list[tuple[int, int]]


def sums(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def make(lengths: list[tuple[int, int]], page_size: int = 5, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(len(lengths) + page_size)
    q_lengths, k_lengths = [n for n, _ in lengths], [n for _, n in lengths]
    q, k, v = (
        torch.randn(sum(n), heads, DIM, generator=generator).to(dtype)
        for n, heads in ((q_lengths, QO_HEADS), (k_lengths, HEADS), (k_lengths, HEADS))
    )
    counts = [-(-n // page_size) for n in k_lengths]
    indices = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)].to(torch.int32)
    cache = torch.full((sum(counts) + 2, 2, page_size, HEADS, DIM), torch.nan, dtype=dtype)
    row = 0
    for r, n in enumerate(k_lengths):
        for t in range(n):
            page = indices[sum(counts[:r]) + t // page_size]
            cache[page, 0, t % page_size], cache[page, 1, t % page_size] = k[row], v[row]
            row += 1
    last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in k_lengths], dtype=torch.int32)
    return Batch(q, k, v, cache, sums(q_lengths), sums(k_lengths), (sums(counts), indices, last), lengths)


def slopes() -> torch.Tensor:
    """ALiBi's for six heads: four of the power of two below, then two in between."""
    return torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3], dtype=torch.float64)


def want(batch: Batch, dtype: torch.dtype, masks: list[torch.Tensor] | None = None, **options: Any) -> list[Any]:
    """(o, base-2 lse) computed in `dtype`."""
    causal, left, cap = options.get("causal", False), options.get("window_left", -1), options.get("logits_soft_cap")
    o, lse, q0, k0 = [], [], 0, 0
    for r, (n, m) in enumerate(batch.lengths):
        q = batch.q[q0 : q0 + n].to(dtype).transpose(0, 1)[None]
        k, v = (x[k0 : k0 + m].to(dtype).transpose(0, 1)[None] for x in (batch.k, batch.v))
        q0, k0 = q0 + n, k0 + m
        index, j = torch.arange(n)[:, None], torch.arange(m)
        seen = torch.ones(n, m, dtype=torch.bool)
        if masks is not None:
            seen &= masks[r]
        elif causal:
            seen &= j <= index + m - n
        if left >= 0:
            seen &= j + n + left >= m + index

        def scores(s: torch.Tensor, index: torch.Tensor = index, j: torch.Tensor = j) -> torch.Tensor:
            if options.get("pos_encoding_mode") == "ALIBI":
                s = s + slopes().to(s.dtype)[:, None, None] * (j - index)
            return cap * torch.tanh(s / cap) if cap else s

        if n and m:
            got_o, got_lse, _ = dense(q, k, v, seen, scores, scale=options.get("sm_scale"))
        else:
            got_o, got_lse = q * 0, torch.full(q.shape[:-1], -torch.inf, dtype=dtype)
        o.append(got_o[0].transpose(0, 1))
        lse.append(got_lse[0].T / math.log(2))
    return [torch.cat(o), torch.cat(lse)]


def agree(got: Any, batch: Batch, masks: list[torch.Tensor] | None = None, **options: Any) -> None:
    exact = want(batch, torch.float64, masks, **options)
    for what, x, reference, plain in zip(
        ("o", "lse"), got, exact, want(batch, batch.q.dtype, masks, **options), strict=True
    ):
        assert_close(x, reference, plain, what, 1.0)


def planned(
    batch: Batch, page_size: int, layout: str = "NHD", **options: Any
) -> fi.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    options.setdefault("q_data_type", batch.q.dtype)
    wrapper.plan(batch.qo_indptr, *batch.pages, QO_HEADS, HEADS, DIM, page_size, **options)
    return wrapper


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 3},
    "its own key alone": {"window_left": 0, "causal": True},
    "soft cap": {"logits_soft_cap": 1.5, "causal": True},
    "no soft cap": {"logits_soft_cap": 0.0},
    "alibi": {"pos_encoding_mode": "ALIBI", "causal": True},
    "scale": {"sm_scale": 0.9},
}


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("name", CASES)
def test_paged_prefill(name: str, page_size: int) -> None:
    batch = make(LENGTHS, page_size)
    for layout in ("NHD", "HND"):
        cache = batch.cache if layout == "NHD" else batch.cache.transpose(2, 3).contiguous()
        wrapper = planned(batch, page_size, layout, **CASES[name])
        agree(wrapper.run(batch.q, cache, return_lse=True), batch, **CASES[name])
        agree(wrapper.run_return_lse(batch.q, (cache[:, 0], cache[:, 1])), batch, **CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_ragged_prefill(name: str) -> None:
    batch = make(LENGTHS)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD")
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, QO_HEADS, HEADS, DIM, q_data_type=torch.float32, **CASES[name])
    agree(wrapper.run(batch.q, batch.k, batch.v, return_lse=True), batch, **CASES[name])
    assert wrapper.run(batch.q, batch.k, batch.v).shape == batch.q.shape


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("name", [name for name in CASES if "causal" not in CASES[name]] + ["alibi"])
def test_decode(name: str, page_size: int) -> None:
    batch = make([(1, 17), (1, 1), (1, 0), (1, 35)], page_size)
    options = {key: x for key, x in CASES[name].items() if key != "causal"}
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
    wrapper.plan(*batch.pages, QO_HEADS, HEADS, DIM, page_size, data_type="float32", **options)
    agree(wrapper.run(batch.q, batch.cache, return_lse=True), batch, **options)
    agree(wrapper.forward_return_lse(batch.q, batch.cache, **options), batch, **options)
    out, lse = torch.empty_like(batch.q), torch.empty(batch.q.shape[:2])
    got = wrapper.run(batch.q, batch.cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    agree(got, batch, **options)


def test_positionals_of_the_decode_wrapper() -> None:
    batch = make([(1, 17), (1, 9)])
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", False, True)
    wrapper.begin_forward(*batch.pages, QO_HEADS, HEADS, DIM, 5, "NONE", 4, 2.0, "float32")
    agree(wrapper.run_return_lse(batch.q, batch.cache), batch, window_left=4, logits_soft_cap=2.0)
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(WORKSPACE, WORKSPACE)
    assert wrapper.use_tensor_cores
    assert not wrapper.is_cuda_graph_enabled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    batch = make(LENGTHS, dtype=dtype)
    got = planned(batch, 5, causal=True, q_data_type=str(dtype).split(".")[1]).run(
        batch.q, batch.cache, return_lse=True
    )
    exact, plain = (want(batch, x, causal=True) for x in (torch.float64, dtype))
    assert_close(got[0], exact[0], plain[0], "o", 1.0)
    assert_close(got[1], exact[1], plain[1].float(), "lse", 1.0)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=4),
    page_size=st.integers(1, 17),
    causal=st.booleans(),
    window_left=st.integers(-1, 6),
)
def test_any_batch(lengths: list[tuple[int, int]], page_size: int, causal: bool, window_left: int) -> None:
    batch, options = make(lengths, page_size), {"causal": causal, "window_left": window_left}
    agree(planned(batch, page_size, **options).run(batch.q, batch.cache, return_lse=True), batch, **options)


def test_a_last_page_of_length_0_holds_nothing() -> None:
    batch = make([(2, 10), (1, 0), (1, 5)])
    first, indices, last = batch.pages
    assert last.tolist() == [5, 0, 5]
    seen = make([(2, 5), (1, 0), (1, 0)])
    cache = batch.cache.clone()
    cache[indices[0], :] = torch.stack([seen.k[:5], seen.v[:5]])
    cache[indices[1:]] = torch.nan  # no token lies there
    wrapper = planned(batch._replace(pages=(first, indices, torch.zeros_like(last))), 5)
    agree(wrapper.run(batch.q, cache, return_lse=True), seen._replace(q=batch.q))
    assert fi.get_seq_lens(first, torch.zeros_like(last), 5).tolist() == [5, 0, 0]


def packed_bits(masks: list[torch.Tensor]) -> torch.Tensor:
    """Bit n of byte n // 8, from the little end, each request padded to whole bytes."""
    out: list[int] = []
    for mask in masks:
        bits = mask.flatten().tolist()
        out += [sum(bit << n for n, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]
    return torch.tensor(out, dtype=torch.uint8)


@pytest.mark.parametrize("window_left", [-1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_custom_masks(packed: bool, window_left: int) -> None:
    batch = make(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(n, m, generator=generator) < 0.6 for n, m in LENGTHS]
    flat = torch.cat([mask.flatten() for mask in masks])
    chosen = {"packed_custom_mask": packed_bits(masks)} if packed else {"custom_mask": flat}
    paged = planned(batch, 5, causal=True, window_left=window_left, **chosen)
    agree(paged.run(batch.q, batch.cache, return_lse=True), batch, masks, window_left=window_left)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(
        batch.qo_indptr, batch.kv_indptr, QO_HEADS, HEADS, DIM, q_data_type="float32", window_left=window_left, **chosen
    )
    agree(ragged.run(batch.q, batch.k, batch.v, return_lse=True), batch, masks, window_left=window_left)


def test_scales_and_sinks() -> None:
    batch = make(LENGTHS)
    wrapper = planned(batch, 5)
    o, lse = wrapper.run(batch.q, batch.cache, q_scale=0.5, k_scale=1.5, v_scale=3.0, return_lse=True)
    agree((o / 3.0, lse), batch, sm_scale=0.75 * DIM**-0.5)
    sinks = torch.linspace(-1, 2, QO_HEADS)
    exact, log2 = want(batch, torch.float64)
    weight = torch.sigmoid(log2 * math.log(2) - sinks.double())
    assert_close(
        wrapper.run(batch.q, batch.cache, sinks=sinks),
        exact * weight[..., None],
        (exact * weight[..., None]).float(),
        size=1.0,
    )


def test_options_of_a_call_replace_the_plans() -> None:
    batch = make(LENGTHS)
    wrapper = planned(batch, 5, causal=True, window_left=9)
    agree(wrapper.run(batch.q, batch.cache, window_left=2, return_lse=True), batch, causal=True, window_left=2)
    agree(wrapper.forward_return_lse(batch.q, batch.cache), batch)
    agree(wrapper.forward_return_lse(batch.q, batch.cache, True, sm_scale=0.3), batch, causal=True, sm_scale=0.3)
    agree(wrapper.run_return_lse(batch.q, batch.cache), batch, causal=True, window_left=9)


@pytest.mark.parametrize("name", CASES)
def test_single_requests(name: str) -> None:
    options = CASES[name]
    batch = make([(3, 17)])
    q, k, v = batch.q, batch.k, batch.v
    agree(fi.single_prefill_with_kv_cache_return_lse(q, k, v, **options), batch, **options)
    hnd = [x.transpose(0, 1).contiguous() for x in (k, v)]
    agree(fi.single_prefill_with_kv_cache(q, *hnd, kv_layout="HND", return_lse=True, **options), batch, **options)
    one, options = make([(1, 17)]), {key: x for key, x in options.items() if key != "causal"}
    o, lse = fi.single_decode_with_kv_cache(one.q[0], one.k, one.v, return_lse=True, **options)
    agree((o[None], lse[None]), one, **options)
    assert torch.equal(fi.single_decode_with_kv_cache(one.q[0], one.k, one.v, **options), o)


def test_the_mask_of_a_single_request() -> None:
    batch, mask = make([(3, 17)]), torch.rand(3, 17, generator=torch.Generator().manual_seed(0)) < 0.5
    for masks in ({"custom_mask": mask}, {"packed_custom_mask": packed_bits([mask])}):
        got = fi.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, return_lse=True, **masks)
        agree(got, batch, [mask])


def test_batch_attention() -> None:
    batch = make(LENGTHS)
    wrapper = fi.BatchAttention(device="cpu")
    lengths = torch.tensor([n for _, n in LENGTHS], dtype=torch.int32)
    first, indices, _ = batch.pages
    types = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    sizes = (QO_HEADS, HEADS, DIM, DIM, 5)
    wrapper.plan(batch.qo_indptr, first, indices, lengths, *sizes, True, None, 2.0, **types)
    agree(wrapper.run(batch.q, (batch.cache[:, 0], batch.cache[:, 1])), batch, causal=True, logits_soft_cap=2.0)
    agree(wrapper.run(batch.q, batch.cache, logits_soft_cap=1.0), batch, causal=True, logits_soft_cap=1.0)


def test_cascade_is_plain_attention() -> None:
    prefix, suffixes, page_size = 10, [(2, 3), (1, 7), (3, 5)], 5
    batch = make([(n, prefix + m) for n, m in suffixes], page_size)
    first, indices, last = batch.pages
    cache, k, v = batch.cache.clone(), batch.k.clone(), batch.v.clone()
    for r, start in enumerate(batch.kv_indptr[:-1].tolist()):  # one prefix for all
        k[start : start + prefix], v[start : start + prefix] = batch.k[:prefix], batch.v[:prefix]
        own = indices[first[r] : first[r] + 2]
        cache[own] = batch.cache[indices[:2]]
    plain = planned(batch, page_size, causal=True).run(batch.q, cache)
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD")
    own = [indices[a + 2 : b] for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]
    wrapper.plan(
        [torch.tensor([0, batch.q.shape[0]], dtype=torch.int32), batch.qo_indptr],
        [torch.tensor([0, 2], dtype=torch.int32), sums([len(x) for x in own])],
        [indices[:2], torch.cat(own)],
        [torch.tensor([page_size], dtype=torch.int32), last],
        QO_HEADS, HEADS, DIM, page_size, causal=True, q_data_type="float32",
    )  # fmt: skip
    exact = want(batch._replace(k=k, v=v), torch.float64, causal=True)[0]
    assert_close(wrapper.run(batch.q, cache), exact, plain)


def test_states_merge() -> None:
    batch = make([(3, 17)])
    q, k, v = batch.q, batch.k, batch.v
    parts = [fi.single_prefill_with_kv_cache_return_lse(q, k[a:b], v[a:b]) for a, b in ((0, 5), (5, 6), (6, 17))]
    two = fi.merge_state(*parts[0], *parts[1])
    agree(fi.merge_state(*two, *parts[2]), batch)
    stacked = (torch.stack([x[n] for x in parts], 1) for n in (0, 1))
    agree(fi.merge_states(*stacked), batch)
    merged_v, merged_s = two[0].clone(), two[1].clone()
    fi.merge_state_in_place(merged_v, merged_s, *parts[2])
    agree((merged_v, merged_s), batch)
    chosen = torch.tensor([True, False, True])
    some_v, some_s = two[0].clone(), two[1].clone()
    fi.merge_state_in_place(some_v, some_s, *parts[2], mask=chosen)
    assert torch.equal(some_v, torch.where(chosen[:, None, None], merged_v, two[0]))
    assert torch.equal(some_s, torch.where(chosen[:, None], merged_s, two[1]))
    empty = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    agree(fi.merge_state(*empty, *fi.merge_state(*two, *parts[2])), batch)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_append_then_attend(layout: str, page_size: int) -> None:
    batch = make(LENGTHS, page_size)
    first, indices, last = batch.pages
    lengths = fi.get_seq_lens(first, last, page_size)
    assert lengths.tolist() == [n for _, n in LENGTHS]
    rows = batch.k.shape[0] + 2  # two rows of nobody
    request, position = fi.get_batch_indices_positions(batch.kv_indptr, lengths, rows)
    assert request[-2:].tolist() == [-1, -1]
    cache = torch.full_like(batch.cache, torch.nan)
    target = cache if layout == "NHD" else cache.transpose(2, 3).contiguous()
    k, v = (torch.cat([x, torch.full((2, HEADS, DIM), 1e9)]) for x in (batch.k, batch.v))
    for cut in (torch.arange(9), torch.tensor([rows - 2, rows - 1, *range(9, rows - 2)])):
        fi.append_paged_kv_cache(k[cut], v[cut], request[cut], position[cut], target, indices, first, last, layout)
    agree(planned(batch, page_size, layout).run(batch.q, target, return_lse=True), batch)
    got = target if layout == "NHD" else target.transpose(2, 3)
    torch.testing.assert_close(got, batch.cache, rtol=0, atol=0, equal_nan=True)
    nobody = torch.full((2,), -1, dtype=torch.int32)
    before = target.clone()
    fi.append_paged_kv_cache(k[-2:], v[-2:], nobody, position[:2], target, indices, first, last, layout)
    torch.testing.assert_close(target, before, rtol=0, atol=0, equal_nan=True)


def test_positions_of_new_tokens() -> None:
    request, position = fi.get_batch_indices_positions(sums([1, 2, 0, 3]), torch.tensor([5, 5, 7, 4]), 6)
    assert request.tolist() == [0, 1, 1, 3, 3, 3]
    assert position.tolist() == [4, 3, 4, 1, 2, 3]
    assert request.dtype == position.dtype == torch.int32
