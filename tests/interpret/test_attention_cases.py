"""The Triton rows on every named case that the interpreter can take, in several tile shapes.

bfloat16 is left out: Triton 3.6's interpreter multiplies bfloat16 matrices wrongly without a word.
"""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.interpret.small_tiles import single, use_tiles
from tilewise.core.errors import UnsupportedError
from tilewise.ops.attention import triton_plans
from tilewise.testing import cases as build
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, INTERPRETER_CASES
from tilewise.testing.matrix import name_of, runnable
from tilewise.testing.properties import Setting

IMPLS = ("triton", "triton_decode")
WHOLE = ("plain", "causal")  # these keep both batch elements
SMALL = [case if case.name in WHOLE else single(case) for case in INTERPRETER_CASES]
SMALL += [single(CASES["gqa_2"])]  # small with one batch element
HALF = ("causal", "window", "document", "alibi_causal", "softcap_causal", "bias", "gqa_2", "sink_causal", "dropout",
        "head_dim_40", "packed_causal", "one_query", "few_queries", "lse_gradient")  # fmt: skip
MATRIX = [*runnable(IMPLS, SMALL, (torch.float32,)),
          *runnable(IMPLS, [case for case in SMALL if case.name in HALF], (torch.float16,))]  # fmt: skip
RESHAPED = [
    *(("narrow", name) for name in ("window_two_sided", "causal_more_keys", "explicit", "bias", "gqa_3",
                                    "packed_cross_causal", "packed_document", "sliding_tile_curve")),
    *(("tall", name) for name in ("window", "document_window", "alibi_causal", "dropout_causal", "packed_window_sink")),
    *(("described", name) for name in ("causal", "window_two_sided", "neighborhood_1d", "head_dim_40", "sliced",
                                       "packed_causal")),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "case"), MATRIX, ids=name_of)
def test_equals_the_reference(setting: Setting, case: Case) -> None:
    check = properties.gradients_equal_reference if setting.has_backward else properties.equals_reference
    check(setting, case)


def test_every_small_case_runs() -> None:
    ran = {impl: {case.name for setting, case in MATRIX if setting.impl == impl} for impl in IMPLS}
    assert ran["triton"] == {case.name for case in SMALL}
    assert {"one_query", "one_query_long", "few_queries", "length_1", "length_7"} <= ran["triton_decode"]
    assert not ran["triton_decode"] & {"dropout", "packed", "causal"}


@pytest.mark.parametrize(("tiles", "name"), RESHAPED)
def test_gradients_hold_for_other_tiles(tiles: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, tiles)
    properties.gradients_equal_reference(Setting("triton"), single(CASES[name]))


@pytest.mark.parametrize("name", ["causal", "document", "gqa_2", "packed_causal"])
def test_gradients_hold_where_pairs_take_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plans, "together", lambda call, mask, slots, pairs: min(pairs, 3))
    properties.gradients_equal_reference(Setting("triton"), CASES[name])


@pytest.mark.parametrize(
    "name",
    ["causal_more_queries", "window_empty_rows", "padding", "explicit", "sink_empty_rows", "packed_cross_causal"],
)
def test_empty_rows_are_exactly_zero(name: str) -> None:
    properties.equals_reference(Setting("triton"), single(CASES[name]))


EDGES = [(1, 1), (1, 16), (15, 17), (16, 16), (17, 31), (31, 33), (32, 48), (33, 15), (47, 49), (64, 1)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), EDGES)
def test_lengths_next_to_multiples_of_tiles(seqlen_q: int, seqlen_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, "narrow")
    case = Case("edges", 1, seqlen_q, seqlen_k, 1, 1, mask=build.window(11, 4), score=build.alibi, lse_gradient=True)
    properties.gradients_equal_reference(Setting("triton"), case)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 63), (2, 64), (3, 65), (16, 129), (5, 300)])
def test_decode_lengths_next_to_multiples_of_tiles(seqlen_q: int, seqlen_k: int) -> None:
    case = Case("edges", 1, seqlen_q, seqlen_k, 4, 2, sink=True, mask=build.window(90), score=build.alibi)
    properties.equals_reference(Setting("triton_decode"), case)


@pytest.mark.parametrize("dims", [(16, 16), (17, 33), (40, 24), (5, 64)])
def test_head_dims_that_are_no_powers_of_two(dims: tuple[int, int]) -> None:
    case = Case("dims", 1, 20, 35, 2, 1, head_dim=dims[0], head_dim_v=dims[1], mask=build.causal)
    for impl in IMPLS:
        check = properties.equals_reference if impl == "triton_decode" else properties.gradients_equal_reference
        check(Setting(impl), case)


def test_decode_takes_part_in_a_whole_when_the_keys_are_split() -> None:
    """More splits than one, of unequal numbers of tiles, some of which the window leaves empty."""
    from tilewise.ops.attention import triton_decode
    from tilewise.ops.attention.problem import make_call

    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 64 * 9 + 5, 2, 16)
    _, _, splits = triton_decode._plan(make_call(q, k, k))
    assert splits > 4
    case = Case("splits", 1, 2, 64 * 9 + 5, 4, 2, mask=build.window(200))
    properties.equals_reference(Setting("triton_decode"), case)


def test_captured_gradients_are_refused_when_determinism_is_asked_for() -> None:
    x, slopes = torch.randn(1, 8, 2, 16, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(UnsupportedError, match="deterministic"):
        tw.attention(x, x, x, score=tw.alibi(slopes), deterministic=True, impl="triton")


def test_bfloat16_is_not_tested_here() -> None:
    assert torch.bfloat16 not in {setting.dtype for setting, _ in MATRIX}
