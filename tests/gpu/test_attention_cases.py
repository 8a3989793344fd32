"""The Triton rows on a GPU: every named case at every dtype, forward and backward, and shapes drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tests.gpu.matrix import DEVICE, case_matrix
from tilewise.testing import cases as build
from tilewise.testing import plain, properties
from tilewise.testing.budgets import Expectation, error, expectation
from tilewise.testing.case import Builder, Case, Maker, Spelled
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.matrix import name_of
from tilewise.testing.properties import Setting
from tilewise.testing.strategies import shapes


def _softcap(cap: float) -> Builder:
    return lambda case, make: Spelled(tw.softcap(cap), plain.softcap(cap))


def _wide_head_blocks(case: Case, make: Maker) -> Spelled:
    return build.head_blocks(case, make)


def _tile_blocks(case: Case, make: Maker) -> Spelled:
    """Tiles that no mask cuts; one head has queries that see nothing, another keys that nobody sees."""
    tiles = -(-case.seqlen_k // 128)
    seen = make.booleans(0.4, case.heads_q, tiles, tiles)
    seen[0, -2] = False
    seen[1, :, 2] = False
    return Spelled(tw.blocks(seen, 128), plain.blocks(seen, 128))


MORE = [
    Case("wide_causal", 2, 500, 500, 8, 2, 64, 64, mask=build.causal, sink=True, lse_gradient=True),
    Case("wide_window", 1, 700, 900, 4, 4, 128, 128, mask=build.window(257, 130), score=build.alibi),
    Case("wide_document", 2, 600, 600, 4, 2, 128, 128, mask=build.document_window),
    Case("wide_blocks", 1, 512, 512, 4, 1, 64, 64, mask=_wide_head_blocks, score=build.softcap),
    *(Case(f"tile_blocks_{d}", 2, 700, 956, 4, 4, d, d, mask=_tile_blocks, lse_gradient=True) for d in (64, 128, 256)),
    Case("softcap_30", 1, 300, 300, 2, 2, 64, 64, mask=build.causal, score=_softcap(30.0), scale=1.0),
    Case("bias_wide", 2, 200, 300, 4, 2, 64, 64, score=build.bias),
    Case("head_dim_256_more", 1, 200, 300, 4, 2, 256, 256, mask=build.causal, lse_gradient=True),
    Case("packed_wide", packed=((300, 300), (0, 0), (1, 1), (129, 129), (64, 64)), heads_q=8, heads_kv=2, head_dim=128,
         head_dim_v=128, mask=build.document, dropout=0.1),
    Case("one_head_of_keys", 1, 200, 300, 71, 1, 64, 64, mask=build.causal),
    Case("many_heads_wide", 1, 200, 300, 128, 128, 192, 128, mask=build.causal, lse_gradient=True),
    Case("own_heads_decode", 2, 1, 2500, 32, 32, 128, 128),
    Case("decode_long", 3, 1, 5000, 16, 2, 128, 128, mask=build.causal, sink=True),
    Case("decode_window", 2, 4, 3000, 8, 1, 64, 64, mask=build.window(1000), score=build.batch_alibi),
]  # fmt: skip
ALL = [*CASES.values(), *MORE]
HALVES = case_matrix(ALL, (torch.bfloat16, torch.float16))
SINGLES = case_matrix([case for case in ALL if case.head_dim <= 256], (torch.float32,))


def check(setting: Setting, case: Case) -> None:
    if setting.has_backward:
        properties.gradients_equal_reference(setting, case)
    else:
        properties.equals_reference(setting, case)


@pytest.mark.parametrize(("setting", "case"), HALVES, ids=name_of)
def test_equals_the_reference_in_16_bit(setting: Setting, case: Case) -> None:
    check(setting, case)


@pytest.mark.parametrize(("setting", "case"), SINGLES, ids=name_of)
def test_equals_the_reference_in_float32(setting: Setting, case: Case) -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    check(setting, case)


EMPTY = ("causal_more_queries", "window_empty_rows", "padding", "explicit", "sink_empty_rows", "packed_cross_causal")


@pytest.mark.parametrize("name", EMPTY)
def test_empty_rows_are_exactly_zero(name: str) -> None:
    properties.equals_reference(Setting("triton", torch.bfloat16, DEVICE), CASES[name])


def test_every_case_is_listed() -> None:
    assert {case.name for setting, case in HALVES if setting.impl == "triton"} == {case.name for case in ALL}
    assert {"one_query_long", "decode_long", "few_queries"} <= {c.name for s, c in HALVES if s.impl == "triton_decode"}


class TruncatedProducts(TorchDispatchMode):
    """float32 matrix products of factors cut to TF32's ten bits: what a tensor core makes of float32 registers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::bmm"):
            args = [x.view(torch.int32).bitwise_and(-(2**13)).view(x.dtype) if x.dtype == torch.float32 else x
                    for x in args]  # fmt: skip
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "name", ["causal", "head_dim_64", "alibi_causal", "head_dim_128", "wide_window", "packed_causal"]
)
def test_tf32_has_the_error_of_truncated_factors_at_most(name: str, request: pytest.FixtureRequest) -> None:
    case = next(case for case in ALL if case.name == name)
    exact = expectation(case, torch.float32, DEVICE)  # before the setting changes: its own error counts there
    with TruncatedProducts():
        truncated = expectation.__wrapped__(case, torch.float32, DEVICE)
    request.getfixturevalue("_tf32")
    got = properties.run(Setting("triton", torch.float32, DEVICE), make_inputs(case, torch.float32, DEVICE))
    properties.within(got, Expectation(exact.values, truncated.allowed))
    assert error(got["o"], exact.values["o"]) > exact.allowed["o"], "this is float32's precision, not TF32's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@hypothesis_settings(max_examples=8)
@given(case=shapes())
def test_any_shape_equals_the_reference(dtype: torch.dtype, case: Case) -> None:
    setting = Setting("triton", dtype, DEVICE)
    properties.equals_reference(setting, case)
    properties.gradients_equal_reference(setting, case)
