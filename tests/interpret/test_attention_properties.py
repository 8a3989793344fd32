"""Determinism, independence and equivalences of the Triton rows: the same properties that the CPU path faces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given
from hypothesis import settings as hypothesis_settings

import tilewise as tw
from tests.interpret.small_tiles import use_tiles
from tilewise.core.errors import UnsupportedError
from tilewise.formula.formula import as_mask, as_score
from tilewise.ops.attention import triton_decode
from tilewise.ops.attention.problem import Call
from tilewise.ops.triton_launch import Plan
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.far_scores import SIZES, least_scores_are_hidden, low_rows_are_means, no_sink_adds_nothing
from tilewise.testing.inputs import make_inputs, untouched
from tilewise.testing.matrix import PROPERTIES, Check, name_of, property_matrix
from tilewise.testing.properties import Setting
from tilewise.testing.strategies import (
    Tree,
    as_mask_function,
    as_score_function,
    bool_trees,
    captured_tensors,
    float_trees,
)

MATRIX = property_matrix(("triton", "triton_decode"), (torch.float32,))


@pytest.mark.parametrize(("check", "setting", "case"), MATRIX, ids=name_of)
def test_property(check: Check, setting: Setting, case: Case) -> None:
    if check is properties.repeats_are_equal:
        properties.repeats_are_equal(setting, case, times=2)
    else:
        check(setting, case)


def test_every_property_is_checked() -> None:
    assert {check for check, setting, _ in MATRIX if setting.impl == "triton"} == set(PROPERTIES)
    assert {setting.impl for _, setting, _ in MATRIX} == {"triton", "triton_decode"}


@pytest.mark.parametrize("mask", [None, tw.causal], ids=["full", "causal"])
@pytest.mark.parametrize(("impl", "queries"), [("triton", 70), ("triton_decode", 5)])
def test_least_scores_are_hidden(impl: str, queries: int, mask: tw.Mask | None) -> None:
    least_scores_are_hidden(Setting(impl), mask, queries)


LOW = [("triton_decode", 5, 1e3), *(("triton", 70, size) for size in SIZES)]


@pytest.mark.parametrize(("impl", "queries", "size"), LOW)
def test_low_rows_are_means(impl: str, queries: int, size: float) -> None:
    low_rows_are_means(Setting(impl), size, queries=queries)


@pytest.mark.parametrize(("impl", "queries"), [("triton", 70), ("triton_decode", 5)])
def test_no_sink_adds_nothing(impl: str, queries: int) -> None:
    no_sink_adds_nothing(Setting(impl), queries=queries)


def test_an_infinite_score_makes_lse_infinite() -> None:
    q = torch.randn(1, 70, 2, 16)
    score = tw.score(lambda s, b, h, i, j: torch.where((j == 40) & (i % 3 == 0), torch.inf, s))
    found, wanted = (tw.attention_with_lse(q, q, q, score=score, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found[1].isposinf().any()


@pytest.mark.parametrize("far", [0, 1, 2])
def test_rows_that_lie_far_apart(far: int) -> None:
    """Of q, k or v: 2**31 elements and more inside a tile; only what is named of their memory is touched."""
    given = [torch.randn(1, 128, 1, 16, dtype=torch.float16) for _ in range(3)]
    apart = 2**31 // 48 // 8 * 8  # rows of a tile of 64 reach beyond
    held = untouched(128 * apart, torch.float16).as_strided((1, 128, 1, 16), (16, apart, 16, 1))
    tensors = [held.copy_(x) if n == far else x for n, x in enumerate(given)]
    assert torch.equal(tw.attention(*tensors, impl="triton"), tw.attention(*given, impl="triton"))
    if far > 0:
        with pytest.raises(UnsupportedError, match="elements apart"):
            tw.attention(given[0][:, :1], *tensors[1:], impl="triton_decode")


SPELLINGS: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("causal", lambda: {"mask": lambda b, h, i, j: ~(j > i)}),
    ("causal", lambda: {"mask": tw.explicit(torch.ones(65, 65).tril().bool())}),  # tile lists for loop bounds
    ("causal", lambda: {"mask": tw.causal, "score": lambda s, b, h, i, j: s}),
    ("window", lambda: {"mask": ~(~tw.causal | ~tw.window(9, None))}),
    ("softcap_causal", lambda: {"score": lambda s, b, h, i, j: 1.5 * torch.tanh(s / 1.5)}),
]


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS)
def test_formulas_of_one_meaning_agree(name: str, spelling: Callable[[], dict[str, Any]]) -> None:
    case = CASES[name].with_(batch=1)
    properties.formulas_of_one_meaning_agree(Setting("triton"), case, **spelling())


@pytest.mark.parametrize("name", ["dropout", "dropout_causal", "packed_dropout"])
def test_dropout_drops_what_the_cpu_drops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one-hot values o shows each weight: the zeros are where the CPU's are, forward and (in dv) backward."""
    use_tiles(monkeypatch, "narrow")
    keys = sum(k for _, k in CASES[name].lengths) if CASES[name].packed else CASES[name].seqlen_k
    case = CASES[name].with_(head_dim_v=keys, batch=1 if CASES[name].packed is None else CASES[name].batch)
    found = []
    for impl in ("triton", "cpu_tiled"):
        inputs = make_inputs(case, torch.float32)
        eye = torch.eye(keys)[:, None].expand(keys, case.heads_kv, keys)
        inputs.v = (eye if case.packed else eye[None]).contiguous().requires_grad_()
        inputs.do = torch.ones_like(inputs.do)
        found.append(properties.run(Setting(impl), inputs))
    assert torch.equal(found[0]["o"] == 0, found[1]["o"] == 0)
    assert float((found[0]["o"] == 0).float().mean()) > 0.05
    torch.testing.assert_close(found[0]["dv"], found[1]["dv"])


def test_two_calls_of_other_sizes_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are kept by shape: a call after another one gives the bits it gives alone."""
    from tilewise.ops import triton_launch

    setting, short = Setting("triton"), CASES["causal"].with_(batch=1, seqlen_q=20, seqlen_k=30)
    alone = properties.run(setting, make_inputs(short, torch.float32))
    monkeypatch.setattr(triton_launch, "remember", True)
    for case in (CASES["causal"].with_(batch=1), short.with_(seqlen_q=19), short):
        after = properties.run(setting, make_inputs(case, torch.float32))
    properties.same_bits(alone, after, "other calls came first")


@pytest.mark.parametrize(("num_sms", "expected"), [(1, 1), (3, 3), (1000, 21)])
@pytest.mark.parametrize("name", ["causal", "gqa_8", "window_two_sided", "sink_causal", "alibi_causal"])
def test_any_number_of_splits_gives_the_same(
    name: str, num_sms: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one program for each head, which merges one part, to one program for each tile of keys."""
    plan, splits = triton_decode._plan, set()

    def counted(call: Call) -> tuple[Plan, Plan, int]:
        made = plan(call)
        splits.add(made[2])
        return made

    monkeypatch.setattr(triton_decode, "_num_sms", lambda device: num_sms)
    monkeypatch.setattr(triton_decode, "_PROGRAMS_PER_SM", 2)
    monkeypatch.setattr(triton_decode, "_plan", counted)
    properties.equals_reference(Setting("triton_decode"), CASES[name].with_(batch=1, seqlen_q=2, seqlen_k=1300))
    assert splits == {expected}


def test_a_window_is_shared_among_all_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is visible is divided, not the whole sequence, of which a window is the end."""
    plan, parts = triton_decode._plan, []

    def watched(call: Call) -> tuple[Plan, Plan, int]:
        split, merge, splits = plan(call)
        launch = split.launch
        monkeypatch.setattr(split, "launch", lambda tensors, *rest: (launch(tensors, *rest), parts.append(tensors[4])))
        return split, merge, splits

    monkeypatch.setattr(triton_decode, "_num_sms", lambda device: 3)
    monkeypatch.setattr(triton_decode, "_PROGRAMS_PER_SM", 2)
    monkeypatch.setattr(triton_decode, "_plan", watched)
    q, k = torch.randn(1, 1, 4, 16), torch.randn(1, 1300, 2, 16)
    tw.attention(q, k, k, mask=tw.window(320), impl="triton_decode")
    assert parts[0].shape == (4, 3)
    assert bool((parts[0] > -torch.inf).all())


def _drawn_tensors(*last_dims: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, 2, 8, generator=generator, requires_grad=True) for length in last_dims]


def _results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, impl: str, **formula: Any) -> list[torch.Tensor]:
    o, lse = tw.attention_with_lse(q, k, v, impl=impl, **formula)
    do = torch.linspace(-1.0, 1.0, o.numel()).view_as(o)
    return [o, lse, *torch.autograd.grad(o, (q, k, v), do)]


def _formula_symbols(seqlen_q: int, seqlen_k: int) -> dict[str, torch.Tensor]:
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    i = torch.arange(seqlen_k - seqlen_q, seqlen_k)[:, None]
    return {"b": b, "h": h, "i": i, "j": torch.arange(seqlen_k)}


@hypothesis_settings(max_examples=12, phases=[Phase.generate])
@given(tree=bool_trees())
def test_any_mask_runs_as_its_dense_table(tree: Tree) -> None:
    """Through loop bounds or tile lists, forward and backward."""
    mask = as_mask(as_mask_function(tree, captured_tensors()))
    narrow, wide = (
        mask.evaluate(dtype=dtype, **_formula_symbols(21, 40)).expand(2, 2, 21, 40)
        for dtype in (torch.float32, torch.float64)
    )
    assume(torch.equal(narrow, wide))  # else float32 and float64 disagree on a comparison, and either is right
    tensors = _drawn_tensors(21, 40, 40)
    found = _results(*tensors, "triton", mask=mask)
    for got, want in zip(found, _results(*tensors, "reference", mask=tw.explicit(narrow)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@hypothesis_settings(max_examples=12, phases=[Phase.generate])
@given(tree=float_trees())
def test_any_score_runs_as_in_the_reference(tree: Tree) -> None:
    function = as_score_function(tree, captured_tensors())
    score = as_score(lambda s, b, h, i, j: torch.tanh(0.1 * function(s, b, h, i, j)))
    tensors = _drawn_tensors(21, 40, 40)
    s = torch.einsum("bihd,bjhd->bhij", tensors[0], tensors[1]).detach().double() * 8**-0.5
    values = [
        score.evaluate(dtype=dtype, s=at.to(dtype), **_formula_symbols(21, 40)).double()
        for dtype, at in ((torch.float64, s), (torch.float32, s), (torch.float64, s + 1e-5), (torch.float64, s - 1e-5))
    ]
    assume(all(bool(((value - values[0]).abs() < 1e-3).all()) for value in values))  # no score stands at a step
    found = _results(*tensors, "triton", mask=tw.causal, score=score)
    for got, want in zip(found, _results(*tensors, "reference", mask=tw.causal, score=score), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
