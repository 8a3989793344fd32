"""FlashInfer's arguments: what is refused and by which name, plans that fail, and buffers of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.adapters.test_flashinfer import DIM, HEADS, QO_HEADS, WORKSPACE, agree, make, planned
from tilewise.adapters import flashinfer as fi
from tilewise.core.errors import InputError, UnsupportedError

attention_with_lse = tw.attention_with_lse
BATCH = make([(2, 7), (1, 5)])
SIZES = (QO_HEADS, HEADS, DIM, 5)
TENSOR = torch.zeros(2, dtype=torch.int32)

REFUSED_IN_PLAN: dict[str, Any] = {
    "pos_encoding_mode": "ROPE_LLAMA",
    "q_data_type": "float8_e4m3fn",
    "kv_data_type": torch.float8_e4m3fn,
    "o_data_type": "float32",
    "prefix_len_ptr": TENSOR,
    "token_pos_in_items_ptr": TENSOR,
    "token_pos_in_items_len": 3,
    "max_item_len_ptr": TENSOR,
}


@pytest.mark.parametrize("name", REFUSED_IN_PLAN)
def test_refused_in_plan(name: str) -> None:
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    options = {name: REFUSED_IN_PLAN[name]}
    with pytest.raises(UnsupportedError, match=f"^{name}: "):
        wrapper.plan(BATCH.qo_indptr, *BATCH.pages, *SIZES, **options)
    with pytest.raises(UnsupportedError, match=f"^{name}: "):
        ragged.plan(BATCH.qo_indptr, BATCH.kv_indptr, QO_HEADS, HEADS, DIM, **options)


REFUSED_IN_RUN: dict[str, Any] = {
    "kv_cache_sf": TENSOR,
    "skip_softmax_threshold_scale_factor": 2.0,
    "k_scale": torch.ones(1),
    "v_scale": torch.ones(1),
}


@pytest.mark.parametrize("name", REFUSED_IN_RUN)
def test_refused_in_run(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}: "):
        planned(BATCH, 5).run(BATCH.q, BATCH.cache, **{name: REFUSED_IN_RUN[name]})


def test_refused_elsewhere() -> None:
    with pytest.raises(UnsupportedError, match=r"^jit_args: "):
        fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=("name",))
    with pytest.raises(UnsupportedError, match=r"^args: "):
        planned(BATCH, 5).run(BATCH.q, BATCH.cache, 1.0)
    with pytest.raises(UnsupportedError, match=r"^q_len_per_req: got 2"):
        fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).plan(*BATCH.pages, *SIZES, q_len_per_req=2)
    with pytest.raises(UnsupportedError, match=r"^logits_soft_cap: got 3\.0 with ALIBI"):
        planned(BATCH, 5, pos_encoding_mode="ALIBI", logits_soft_cap=3.0)
    with pytest.raises(UnsupportedError, match=r"^kv_layout: "):
        fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "HND")
    with pytest.raises(UnsupportedError, match=r"^custom_mask_buf: "):
        fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, custom_mask_buf=WORKSPACE)
    with pytest.raises(UnsupportedError, match=r"^scale_q: "):
        fi.single_prefill_with_kv_cache(BATCH.q, BATCH.k, BATCH.v, torch.ones(1))
    with pytest.raises(UnsupportedError, match=r"^use_profiler: "):
        fi.BatchAttention(device="cpu").plan(TENSOR, TENSOR, TENSOR, TENSOR, 1, 1, 1, 1, 1, use_profiler=True)
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    for options in ({"window_left": 3}, {"pos_encoding_mode": "ALIBI"}):
        with pytest.raises(UnsupportedError, match=f"^{next(iter(options))}: "):
            wrapper.plan([], [], [], [], *SIZES, **options)


def test_unknown_keywords_raise() -> None:
    decode, prefill = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE), planned(BATCH, 5)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    for call in (
        lambda: decode.plan(*BATCH.pages, *SIZES, windowleft=3),
        lambda: prefill.plan(BATCH.qo_indptr, *BATCH.pages, *SIZES, windowleft=3),
        lambda: ragged.plan(BATCH.qo_indptr, BATCH.kv_indptr, QO_HEADS, HEADS, DIM, windowleft=3),
        lambda: prefill.run(BATCH.q, BATCH.cache, windowleft=3),
        lambda: prefill.forward(BATCH.q, BATCH.cache, windowleft=3),
        lambda: fi.single_prefill_with_kv_cache(BATCH.q, BATCH.k, BATCH.v, windowleft=3),
    ):
        with pytest.raises(TypeError, match="windowleft"):
            call()


def test_what_steers_other_kernels_is_taken() -> None:
    wrapper = planned(BATCH, 5, non_blocking=False, rope_theta=1e4, block_tables=TENSOR)
    agree(wrapper.run(BATCH.q, BATCH.cache, return_lse=True, enable_pdl=True), BATCH)


ALONE: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, False),
    "a part of 4 pages": ({"fixed_split_size": 4}, True),
    "no parts": ({"disable_split_kv": True}, True),
    "FlashInfer's defaults": ({"fixed_split_size": -1, "disable_split_kv": False}, False),
    "none": ({"fixed_split_size": None}, False),
}


@pytest.mark.parametrize("name", ALONE)
def test_parts_of_keys_that_no_batch_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keywords promise bits that do not depend on the batch, which `batch_invariant` keeps."""
    asked: list[bool] = []

    def attention(*tensors: Any, batch_invariant: bool, **given: Any) -> Any:
        asked.append(batch_invariant)
        return attention_with_lse(*tensors, batch_invariant=batch_invariant, **given)

    monkeypatch.setattr(tw, "attention_with_lse", attention)
    options, wanted = ALONE[name]
    agree(planned(BATCH, 5, **options).run(BATCH.q, BATCH.cache, return_lse=True), BATCH)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.plan(*BATCH.pages, *SIZES, q_data_type="float32", **options)
    decode.run(BATCH.q[:2], BATCH.cache)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(BATCH.qo_indptr, BATCH.kv_indptr, QO_HEADS, HEADS, DIM, q_data_type="float32", **options)
    agree(ragged.run(BATCH.q, BATCH.k, BATCH.v, return_lse=True), BATCH)
    assert asked == [wanted] * 3


def test_parts_of_packed_keys_are_refused_on_a_gpu() -> None:
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, device="meta"))
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    for options in ({"fixed_split_size": 4}, {"disable_split_kv": True}):
        with pytest.raises(UnsupportedError, match=f"^{next(iter(options))}: got"):
            ragged.plan(ends, ends, QO_HEADS, HEADS, DIM, **options)
    for size in (0, -2, 1.5, "4", True):
        with pytest.raises(InputError, match=r"^fixed_split_size: got"):
            planned(BATCH, 5, fixed_split_size=size)


def test_run_before_plan() -> None:
    for wrapper in (
        fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE),
        fi.MultiLevelCascadeAttentionWrapper(1, WORKSPACE),
    ):
        with pytest.raises(InputError, match="run before plan; expected a plan"):
            wrapper.run(BATCH.q, BATCH.cache)


first, indices, last = BATCH.pages
WRONG: dict[str, tuple[dict[int, Any], dict[str, Any], str]] = {
    "running sums of 33 bits": (
        {0: BATCH.qo_indptr + torch.tensor([0, 0, 2**32])},
        {},
        f"qo_indptr: got {2**32 + int(BATCH.qo_indptr[-1])} in",
    ),
    "a length of 33 bits": ({3: last.long() + 2**32}, {}, "paged_kv_last_page_len: got "),
    "falling indptr": ({1: torch.tensor([0, 3, 2])}, {}, "paged_kv_indptr: got "),
    "indptr beyond the indices": ({1: first + torch.tensor([0, 0, 1])}, {}, "paged_kv_indptr: got last 4"),
    "a page too full": ({3: last + 5}, {}, "paged_kv_last_page_len: got "),
    "one length too few": ({3: last[:1]}, {}, "paged_kv_last_page_len: got "),
    "requests that differ": ({0: torch.tensor([0, 3])}, {}, "paged_kv_indptr: got "),
    "heads that do not fit": ({5: 4}, {}, "num_kv_heads: got 4"),
    "no pages at all": ({7: 0}, {}, "page_size: got 0"),
    "a list": ({2: [0, 1]}, {}, "paged_kv_indices: got list"),
    "another window": ({}, {"window_left": 1.5}, "window_left: got 1.5"),
    "another mode": ({}, {"pos_encoding_mode": "XPOS"}, "pos_encoding_mode: got 'XPOS'"),
    "a mask too short": ({}, {"custom_mask": torch.ones(18, dtype=torch.bool)}, "custom_mask: got 18 entries"),
    "a mask too long": ({}, {"custom_mask": torch.ones(20, dtype=torch.bool)}, "custom_mask: got 20 entries"),
    "bits too many": (
        {},
        {"packed_custom_mask": torch.ones(4, dtype=torch.uint8)},
        "packed_custom_mask: got 4 entries",
    ),
    "a mask of floats": ({}, {"custom_mask": torch.ones(19)}, "custom_mask: got torch.float32"),
    "a negative soft cap": ({}, {"logits_soft_cap": -1.0}, "logits_soft_cap: got -1.0"),
    "an unknown type": ({}, {"q_data_type": "real"}, "q_data_type: got 'real'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_fails_leaves_the_one_before(name: str) -> None:
    wrapper = planned(BATCH, 5, causal=True)
    changes, options, message = WRONG[name]
    arguments = [BATCH.qo_indptr, *BATCH.pages, *SIZES]
    for position, value in changes.items():
        arguments[position] = value
    with pytest.raises(InputError, match=f"^{message}"):
        wrapper.plan(*arguments, **options)
    agree(wrapper.run(BATCH.q, BATCH.cache, return_lse=True), BATCH, causal=True)


def test_what_was_not_planned() -> None:
    wrapper = planned(BATCH, 5)
    for q, cache, name in (
        (BATCH.q.half(), BATCH.cache, "q"),
        (BATCH.q[:, :4], BATCH.cache, "q"),
        (BATCH.q, BATCH.cache[:, :, :4], "k"),
        (BATCH.q, BATCH.cache.half(), "k"),
        (BATCH.q, BATCH.cache[:, 0], "paged_kv_cache"),
        (BATCH.q, (BATCH.cache, BATCH.cache), "paged_kv_cache"),
    ):
        with pytest.raises(InputError, match=f"^{name}: "):
            wrapper.run(q, cache)
    with pytest.raises(InputError, match=r"^out: "):
        wrapper.run(BATCH.q, BATCH.cache, out=torch.empty(1))
    with pytest.raises(InputError, match=r"^positions: "):
        fi.append_paged_kv_cache(
            BATCH.k[:1], BATCH.v[:1], torch.tensor([0]), torch.tensor([10]), BATCH.cache.clone(), indices, first, last
        )


def test_a_page_beyond_32_bits_is_none_of_the_cache() -> None:
    wrapper = planned(BATCH._replace(pages=(first, indices.long() + 2**32, last)), 5)
    with pytest.raises(InputError, match=r"^layout block_table: got page 2147483647"):
        wrapper.run(BATCH.q, BATCH.cache)
    with pytest.raises(InputError, match=r"^seq_lens: got "):
        fi.get_batch_indices_positions(BATCH.qo_indptr, torch.tensor([7, 2**32 + 5]), 3)


def test_a_plan_stays_what_it_was_planned_for() -> None:
    pages = tuple(x.clone() for x in BATCH.pages)
    wrapper = planned(BATCH._replace(pages=pages, qo_indptr=BATCH.qo_indptr.clone()), 5)
    for x in pages:
        x.zero_()
    agree(wrapper.run(BATCH.q, BATCH.cache, return_lse=True), BATCH)


def test_sizes_of_index_tensors_are_compared() -> None:
    ends, one, two = BATCH.qo_indptr, torch.tensor([1]), torch.tensor([1, 2])
    appended = (
        BATCH.k[:1],
        BATCH.v[:1],
        torch.tensor([0]),
        torch.tensor([0]),
        BATCH.cache.clone(),
        indices,
        first,
        last,
    )
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, Any]] = {
        "kv_last_page_len": (fi.get_seq_lens, (first, last, 5), 1, one),
        "seq_lens": (fi.get_batch_indices_positions, (ends, two, 4), 1, one),
        "positions": (fi.append_paged_kv_cache, appended, 3, two),
        "batch_indices": (fi.append_paged_kv_cache, appended, 2, torch.tensor([2])),
        "kv_last_page_len ": (fi.append_paged_kv_cache, appended, 7, last[:1]),
    }
    for name, (function, arguments, at, wrong) in calls.items():
        function(*arguments)
        with pytest.raises(InputError, match=f"^{name.strip()}: got"):
            function(*arguments[:at], wrong, *arguments[at + 1 :])
    mask = torch.ones(4, dtype=torch.uint8)  # of 3 * 12 bits
    with pytest.raises(InputError, match=r"^packed_custom_mask: got 4 entries; expected 5"):
        fi.single_prefill_with_kv_cache(BATCH.q, BATCH.k, BATCH.v, packed_custom_mask=mask)


def test_plans_and_appends_read_nothing_from_a_gpu() -> None:
    workspace = torch.empty(1, device="meta")
    ends, numbers = (torch.zeros(n, dtype=torch.int32, device="meta") for n in (4, 3))
    table = (ends, torch.zeros(9, dtype=torch.int32, device="meta"), numbers)
    with pytest.raises(RuntimeError):  # whoever reads a value of these
        ends[-1].item()
    fi.BatchDecodeWithPagedKVCacheWrapper(workspace).plan(*table, *SIZES, window_left=4)
    bits = torch.zeros(7, dtype=torch.uint8, device="meta")
    for options in ({"causal": True}, {"custom_mask": bits.bool()}, {"packed_custom_mask": bits}):
        fi.BatchPrefillWithPagedKVCacheWrapper(workspace).plan(ends, *table, *SIZES, **options)
        ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace)
        ragged.plan(ends, ends, QO_HEADS, HEADS, DIM, **options)
    fi.BatchAttention(device="meta").plan(ends, *table, QO_HEADS, HEADS, DIM, DIM, 5)
    fi.MultiLevelCascadeAttentionWrapper(2, workspace).plan([ends] * 2, *([x] * 2 for x in table), *SIZES)
    cache, k = (torch.zeros(*shape, HEADS, DIM, device="meta") for shape in ((9, 2, 5), (6,)))
    request, position = fi.get_batch_indices_positions(ends, numbers, 6)
    fi.append_paged_kv_cache(k, k, request, position, cache, table[1], ends, numbers)


def test_buffers_take_every_plan() -> None:
    before, after = make([(1, 7), (1, 5)]), make([(1, 12), (1, 0)])
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 9, 2)]
    wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert wrapper.is_cuda_graph_enabled
    kept = None
    for batch in (before, after):
        wrapper.plan(*batch.pages, *SIZES, q_data_type="float32")
        agree(wrapper.run(batch.q, batch.cache, return_lse=True), batch)
        layout = wrapper._ready().layout
        assert layout.block_table[0] is buffers[0]
        assert kept in (None, layout.seqlens_k.data_ptr())
        kept = layout.seqlens_k.data_ptr()
    for wrong in (make([(1, 7)]), make([(1, 40), (1, 40)])):
        with pytest.raises(InputError, match=r"^plan: got .* as the buffer of the CUDA graph has"):
            wrapper.plan(*wrong.pages, *SIZES, q_data_type="float32")
    agree(wrapper.run(after.q, after.cache, return_lse=True), after)
    with pytest.raises(UnsupportedError, match=r"^pos_encoding_mode: got 'ALIBI'"):
        wrapper.plan(*after.pages, *SIZES, q_data_type="float32", pos_encoding_mode="ALIBI")
    with pytest.raises(UnsupportedError, match=r"^pos_encoding_mode: got 'ALIBI'"):
        wrapper.forward(after.q, after.cache, "ALIBI")
    with pytest.raises(InputError, match=r"^use_cuda_graph: "):
        fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
