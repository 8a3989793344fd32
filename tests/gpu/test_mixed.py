"""Both Hopper kernels at the same time: prompts beside requests that decode, any mix, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tests.gpu.paging import lengths_around_pages
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import alibi, causal, softcap, window
from tilewise.testing.graphs import captured
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting

IMPL = "hopper_mixed"
SIZES: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128, "mask": causal}
MIXES = [
    Case("prompt_first", packed=((700, 700), *[(1, 900)] * 12), **SIZES),
    Case("prompts_between", packed=((1, 70), (300, 900), (1, 5000), (0, 40), (130, 130), (4, 600)), **SIZES),
    Case("around_few", packed=((15, 200), (16, 2000), (17, 300), (18, 18)), **SIZES),
    Case("all_decode", packed=tuple((1, 100 * n) for n in range(40)), **SIZES),
    Case("all_prompts", packed=((400, 400), (100, 1000), (640, 641)), **SIZES),
    Case("sink_and_window", packed=((300, 1300), (1, 2000), (2, 90)), **{**SIZES, "mask": window(200)}, sink=True),
    Case("softcap", packed=((300, 1300), (1, 2000), (2, 90)), **SIZES, score=softcap),
    Case("alibi", packed=((300, 1300), (1, 2000), (2, 90)), **SIZES, score=alibi),
    Case("wide", packed=((300, 1300), (1, 2000), (2, 90)), **{**SIZES, "head_dim": 256, "head_dim_v": 192}),
]


@pytest.mark.parametrize(("page_size", "dtype"), [(16, torch.bfloat16), (384, torch.float16)])
@pytest.mark.parametrize("case", MIXES, ids=repr)
def test_mixes(case: Case, page_size: int, dtype: torch.dtype) -> None:
    properties.pages_hold_the_keys(Setting(IMPL, dtype, DEVICE), case, page_size, flat=page_size == 384)


@pytest.mark.parametrize(("mask", "head_dim"), [(causal, 64), (window(100), 80)], ids=["causal", "window"])
def test_lengths_around_pages(mask: Any, head_dim: int) -> None:
    lengths_around_pages(IMPL, mask, head_dim)


def _call(packed: tuple[tuple[int, int], ...]) -> tuple[Any, torch.Tensor, tw.Paged]:
    """(call, q, layout) of a batch in pages of 16."""
    inputs = make_inputs(Case("batch", packed=packed, **SIZES), torch.bfloat16, DEVICE)
    pool = paged(inputs, 16)
    q = inputs.q.detach()
    return lambda impl: tw.attention(q, pool.k, pool.v, mask=tw.causal, layout=pool.layout, impl=impl), q, pool.layout


def test_what_follows_waits_for_both() -> None:
    """The launch of few queries, here a short one, ends no earlier than that of many before it."""
    call, _q, _layout = _call(((6000, 6000), (1, 16)))
    want = call("hopper")[:, 0].clone()
    for _ in range(20):
        after = call(IMPL)[:, 0].clone()
        torch.testing.assert_close(after, want, rtol=2e-2, atol=2e-3)


def test_one_graph_serves_other_mixes() -> None:
    """Who is few, and who has how many multiprocessors, is worked out anew at each replay."""
    call, q, layout = _call(((500, 500), (1, 400), (1, 900), (2, 60)))
    assert layout.cu_seqlens_q is not None
    graph, result = captured(lambda: call(IMPL))
    ends = ((0, 500, 501, 502, 504), (0, 1, 2, 3, 400), (0, 100, 200, 300, 400), (0, 500, 501, 502, 504))
    for cu_seqlens in ends:
        layout.cu_seqlens_q.copy_(torch.tensor(cu_seqlens, dtype=torch.int32))
        graph.replay()
        rows = cu_seqlens[-1]
        torch.testing.assert_close(result[:rows], call("triton_paged")[:rows], rtol=2e-2, atol=2e-3)
    assert result.shape == q.shape


def test_it_is_chosen_for_mixes() -> None:
    table = torch.zeros(64, 600, dtype=torch.int32, device=DEVICE)
    pool = torch.zeros(600, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    for new, others, chosen in ((8192, 63, IMPL), (0, 64, "hopper_decode"), (8192 * 4, 63, "hopper")):
        ends = torch.tensor([0, *range(new, new + others + 1)][-65:], dtype=torch.int32, device=DEVICE)
        q = torch.zeros(new + others, 32, 128, dtype=torch.bfloat16, device=DEVICE)
        seqlens = torch.full((ends.numel() - 1,), 9000, dtype=torch.int32, device=DEVICE)
        layout = tw.Paged(table[: ends.numel() - 1], seqlens, ends)
        assert tw.why(q, pool, pool, mask=tw.causal, layout=layout).chosen == chosen
