"""Every CPU implementation on every named case, at every dtype: forward, backward, shapes drawn by hypothesis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings

import tilewise as tw
from tilewise.ops.attention import cpu
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, CPU_CASES
from tilewise.testing.far_scores import SIZES, least_scores_are_hidden, low_rows_are_means, no_sink_adds_nothing
from tilewise.testing.matrix import name_of, runnable
from tilewise.testing.properties import Setting
from tilewise.testing.strategies import shapes

IMPLS = ("cpu_sdpa", "cpu_tiled")
MATRIX = runnable(IMPLS, CPU_CASES)


@pytest.mark.parametrize(("setting", "case"), MATRIX, ids=name_of)
def test_equals_the_reference(setting: Setting, case: Case) -> None:
    properties.equals_reference(setting, case)


@pytest.mark.parametrize(("setting", "case"), MATRIX, ids=name_of)
def test_gradients_equal_the_reference(setting: Setting, case: Case) -> None:
    properties.gradients_equal_reference(setting, case)


def test_every_case_runs_tiled_and_the_plain_ones_run_fused() -> None:
    ran = {impl: {case.name for setting, case in MATRIX if setting.impl == impl} for impl in IMPLS}
    assert ran["cpu_tiled"] == {case.name for case in CPU_CASES}
    assert {"plain", "causal", "gqa_8", "mqa", "sliced", "expanded", "lse_gradient", "scale_negative"} <= ran[
        "cpu_sdpa"
    ]
    fused_lacks = {"causal_more_keys", "window", "alibi_causal", "sink_causal", "dropout", "packed", "head_dim_192"}
    assert not ran["cpu_sdpa"] & fused_lacks
    assert len(CASES) >= 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@hypothesis_settings(max_examples=30)
@given(case=shapes())
def test_any_shape_equals_the_reference(dtype: torch.dtype, case: Case) -> None:
    setting = Setting("cpu_tiled", dtype)
    properties.equals_reference(setting, case)
    properties.gradients_equal_reference(setting, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_no_bit(impl: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=dtype).requires_grad_() for _ in range(3))
    found = []
    for cast in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            o = tw.attention(q, k, v, mask=tw.causal, impl=impl)
            found.append((o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))))
    for one, other in zip(*found, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("key", [0.0, -float("inf")])
@pytest.mark.parametrize("mask", [None, tw.causal], ids=["full", "causal"])
def test_scores_of_minus_infinity_count_as_unseen(mask: tw.Mask | None, key: float) -> None:
    """PyTorch's lse is 0 there, as it may be of a row that sees something: `merge` would give it a weight."""
    q, k, v = torch.rand(1, 16, 2, 8) + 0.1, torch.full((1, 16, 1, 8), key), torch.randn(1, 16, 1, 8)
    v[:, 0] = 0.0
    o, lse = tw.attention_with_lse(q, k, v, mask=mask, impl="cpu_sdpa")
    wanted_o, wanted_lse = tw.attention_with_lse(q, k, v, mask=mask, impl="reference")
    torch.testing.assert_close(lse, wanted_lse.to(lse.dtype))
    torch.testing.assert_close(o, wanted_o.to(o.dtype))
    assert bool(lse.isneginf().all()) is (key != 0.0)


@pytest.mark.parametrize("mask", [None, tw.causal], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
def test_least_scores_are_hidden(impl: str, dtype: torch.dtype, mask: tw.Mask | None) -> None:
    least_scores_are_hidden(Setting(impl, dtype), mask)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
def test_low_rows_are_means(impl: str, dtype: torch.dtype, size: float) -> None:
    low_rows_are_means(Setting(impl, dtype), size, kept=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
def test_no_sink_adds_nothing(impl: str, dtype: torch.dtype) -> None:
    no_sink_adds_nothing(Setting(impl, dtype))


@pytest.mark.parametrize("mask", [None, tw.causal], ids=["full", "causal"])
def test_an_infinite_score_makes_lse_infinite(mask: tw.Mask | None) -> None:
    q = torch.randn(1, 300, 2, 8)
    score = tw.score(lambda s, b, h, i, j: torch.where((j == 140) & (i % 3 == 0), torch.inf, s))
    found, wanted = (tw.attention_with_lse(q, q, q, mask=mask, score=score, impl=x) for x in ("cpu_tiled", "reference"))
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found[1].isposinf().sum() > 100


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("heads_kv", [1, 2, 6])
def test_heads_may_come_a_few_at_a_time(heads_kv: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where all their scores would leave the cache: the same results, random words and gradients."""
    slopes, table = torch.rand(6), torch.randn(70, 6)
    score = tw.score(lambda s, b, h, i, j: s - slopes[h] * abs(i - j) + table[j, h])
    mask = tw.mask(lambda b, h, i, j: (i + h) % 3 != j % 2)
    found = []
    for in_cache in (2**19, 1):
        torch.manual_seed(0)
        monkeypatch.setattr(cpu, "IN_CACHE", in_cache)
        leaves = [torch.randn(70, n, 8) for n in (6, heads_kv, heads_kv)]
        leaves = [(x if packed else x[None]).requires_grad_() for x in leaves] + [torch.randn(6).requires_grad_()]
        layout = {"layout": tw.Packed(torch.tensor([0, 30, 70], dtype=torch.int32))} if packed else {}
        for captured in (slopes, table):
            captured.requires_grad_()
        options = {"mask": mask, "score": score, "dropout": 0.3, "seed": 5, **layout}
        o, lse = tw.attention_with_lse(*leaves[:3], sink=leaves[3], impl="cpu_tiled", **options)  # type: ignore[arg-type]
        grads = torch.autograd.grad(o.square().sum() + lse.sum(), [*leaves, slopes, table])
        found.append([o, lse, *grads])
    for few, whole in zip(*found, strict=True):
        torch.testing.assert_close(few, whole, rtol=1e-5, atol=1e-5)
