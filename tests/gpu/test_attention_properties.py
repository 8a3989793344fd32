"""Determinism, independence and equivalences of the Triton rows on a GPU; races; dropout's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE, properties_matrix
from tilewise.testing import cases as build
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.far_scores import SIZES, least_scores_are_hidden, low_rows_are_means, no_sink_adds_nothing
from tilewise.testing.inputs import make_inputs
from tilewise.testing.matrix import PROPERTIES, Check, name_of
from tilewise.testing.properties import Setting

MATRIX = properties_matrix((torch.bfloat16, torch.float32))


@pytest.mark.parametrize(("check", "setting", "case"), MATRIX, ids=name_of)
def test_property(check: Check, setting: Setting, case: Case) -> None:
    check(setting, case)


def test_every_property_is_checked() -> None:
    assert {check for check, setting, _ in MATRIX if setting.impl == "triton"} == set(PROPERTIES)
    assert {setting.impl for _, setting, _ in MATRIX} == {"hopper", "triton", "triton_decode"}


@pytest.mark.parametrize("mask", [None, tw.causal], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("impl", "queries"), [("triton", 70), ("hopper", 70), ("triton_decode", 5)])
def test_least_scores_are_hidden(impl: str, queries: int, dtype: torch.dtype, mask: tw.Mask | None) -> None:
    least_scores_are_hidden(Setting(impl, dtype, DEVICE), mask, queries)


LOW = [("triton_decode", 5, 1e3), *((impl, 70, size) for impl in ("triton", "hopper") for size in SIZES)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("impl", "queries", "size"), LOW)
def test_low_rows_are_means(impl: str, queries: int, size: float, dtype: torch.dtype) -> None:
    low_rows_are_means(Setting(impl, dtype, DEVICE), size, queries=queries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("impl", "queries"), [("triton", 70), ("hopper", 70), ("triton_decode", 5)])
def test_no_sink_adds_nothing(impl: str, queries: int, dtype: torch.dtype) -> None:
    no_sink_adds_nothing(Setting(impl, dtype, DEVICE), queries=queries)


RACES = [
    Case("race_causal", 2, 1000, 1000, 8, 2, 64, 64, mask=build.causal, lse_gradient=True),
    Case("race_wide", 1, 1000, 1500, 4, 4, 128, 128, mask=build.window(400), score=build.softcap),
    Case("race_lists", 2, 900, 900, 4, 2, 64, 64, mask=build.document_window, sink=True),
    Case("race_packed", packed=((700, 700), (0, 0), (333, 333), (1, 1)), heads_q=4, heads_kv=1, head_dim=128,
         head_dim_v=128, mask=build.causal, dropout=0.1),
]  # fmt: skip


@pytest.mark.parametrize("case", RACES, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fifty_runs_give_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    """o, lse and all gradients; a kernel that reads what another program still writes would differ now and then."""
    properties.repeats_are_equal(Setting("triton", dtype, DEVICE), case, times=50)


HOPPER_RACES = [
    *RACES,
    Case("race_d256", 1, 900, 1000, 4, 2, 256, 256, mask=build.causal),
    Case("race_long", 1, 3000, 3000, 8, 2, 128, 128, mask=build.causal),
]


@pytest.mark.parametrize("case", HOPPER_RACES, ids=name_of)
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_runs_on_hopper_give_the_same_bits(case: Case, deterministic: bool) -> None:
    """o, lse, dk and dv; dq, whose sums are taken in any order, with deterministic=True only."""
    properties.repeats_are_equal(Setting("hopper", torch.bfloat16, DEVICE), case, 250, deterministic)


JUMPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": build.causal},
    "window": {"mask": build.window(300)},
    "document": {"mask": build.document_window},
    "alibi": {"mask": build.causal, "score": build.alibi},
    "softcap": {"score": build.softcap},
    "high_cap": {"mask": build.causal, "score": build.high_softcap, "sink": True},
    "sink": {"mask": build.causal, "sink": True},
    "negative": {"scale": -1.5},
    "packed": {"mask": build.causal, "packed": tuple((n, n) for n in (700, 3, 0, 450))},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", JUMPS)
def test_maxima_that_jump(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Scores so far apart that many tiles raise a row's maximum by more than 2**8 and many by less."""
    sizes = {"seqlen_q": 500, "seqlen_k": 700, "heads_q": 4, "heads_kv": 2, "head_dim": head_dim}
    case = Case(f"jumps_{name}", **{**sizes, "head_dim_v": head_dim, "scale": 1.5, **JUMPS[name]})
    properties.gradients_equal_reference(Setting("hopper", dtype, DEVICE), case)


MANY_HEADS = [
    Case("many_short", 64, 200, 200, 8, 8, 64, 64),
    Case("many_short_causal", 70, 200, 200, 8, 8, 64, 64, mask=build.causal),
    Case("many_grouped", 100, 300, 300, 16, 4, 48, 48, mask=build.causal),
    Case("many_wide", 40, 600, 600, 8, 8, 128, 128),
    Case("many_windows", 40, 600, 700, 8, 8, 96, 96, mask=build.window(200)),
    Case("many_packed", packed=((300, 300), (5, 5), (0, 0), (200, 200)), heads_q=400, heads_kv=400, head_dim=64,
         head_dim_v=64, mask=build.causal),
]  # fmt: skip


@pytest.mark.parametrize("case", MANY_HEADS, ids=name_of)
def test_heads_that_take_the_places_of_others(case: Case) -> None:
    """More heads than Hopper's sums of dQ have places for."""
    setting = Setting("hopper", torch.bfloat16, DEVICE)
    properties.gradients_equal_reference(setting, case)
    properties.repeats_are_equal(setting, case, 30, deterministic=False)


IN_ORDER = [
    Case("ordered", 2, 1500, 1500, 9, 9, 64, 64),
    Case("ordered_causal", 2, 1500, 1500, 9, 9, 64, 64, mask=build.causal),
    Case("ordered_grouped", 1, 2000, 3000, 8, 2, 128, 128, mask=build.causal),
    Case("ordered_more_queries", 1, 3000, 700, 8, 8, 96, 96, mask=build.causal),
    Case("ordered_many", 16, 600, 600, 8, 8, 128, 128, mask=build.causal),
    Case("ordered_softcap", 1, 1500, 1500, 8, 8, 128, 128, mask=build.causal, score=build.softcap, sink=True),
    Case("ordered_packed", packed=((900, 900), (0, 0), (33, 70), (1500, 1500)), heads_q=8, heads_kv=4, head_dim=128,
         head_dim_v=128, mask=build.causal),
]  # fmt: skip


@pytest.mark.parametrize("case", IN_ORDER, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_a_fixed_order(case: Case, dtype: torch.dtype) -> None:
    """More items than programs, each of which waits for that of the next keys before it adds to dQ."""
    setting = Setting("hopper", dtype, DEVICE)
    properties.gradients_equal_reference(setting, case, deterministic=True)
    properties.repeats_are_equal(setting, case, 30)


def test_fifty_decodes_give_the_same_bits() -> None:
    case = Case("race_decode", 4, 2, 4000, 16, 2, 128, 128, mask=build.causal)
    properties.repeats_are_equal(Setting("triton_decode", torch.bfloat16, DEVICE), case, times=50)


@pytest.mark.parametrize("name", ["dropout", "dropout_causal", "packed_dropout"])
def test_dropout_drops_what_the_cpu_drops(name: str) -> None:
    """One-hot values show each weight in o: the zeros are where the CPU's are."""
    keys = sum(k for _, k in CASES[name].lengths) if CASES[name].packed else CASES[name].seqlen_k
    case = CASES[name].with_(head_dim_v=keys)
    zeros = []
    for impl, device in (("triton", DEVICE), ("cpu_tiled", "cpu")):
        inputs = make_inputs(case, torch.float32, device)
        eye = torch.eye(keys, device=device)[:, None].expand(keys, case.heads_kv, keys)
        inputs.v = eye.contiguous() if case.packed else eye[None].expand(case.batch, -1, -1, -1).contiguous()
        zeros.append((properties.run(Setting(impl, torch.float32, device), inputs, backward=False)["o"] == 0).cpu())
    assert torch.equal(*zeros)


@pytest.mark.parametrize(
    ("impl", "dtype"), [("triton", torch.bfloat16), ("triton", torch.float32), ("hopper", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_views_that_start_anywhere(impl: str, dtype: torch.dtype, first: int) -> None:
    """Pointers aligned to one element only, rows padded to an odd stride: the bits of contiguous copies."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    wide = [torch.randn(2, 150, 2, 71, generator=generator, device=DEVICE, dtype=dtype) for _ in range(3)]
    views = [x[..., first : first + 64] for x in wide]
    copies = [x.contiguous() for x in views]
    found = []
    for q, k, v in (views, copies):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = tw.attention_with_lse(*leaves, mask=tw.causal, impl=impl)
        found.append([o, lse, *torch.autograd.grad(o.sum() + lse.sum(), leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ["triton", "triton_decode", "hopper"])
def test_empty_inputs(impl: str) -> None:
    for batch, seqlen_q, seqlen_k in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        q = torch.randn(batch, seqlen_q, 2, 16, device=DEVICE, dtype=torch.bfloat16)
        k = torch.randn(batch, seqlen_k, 2, 16, device=DEVICE, dtype=torch.bfloat16)
        o, lse = tw.attention_with_lse(q, k, k, mask=tw.causal, impl=impl)
        assert o.shape == q.shape
        assert not o.any()
        assert bool((lse == -torch.inf).all())
