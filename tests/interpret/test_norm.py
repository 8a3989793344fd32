"""The Triton kernels of norms: rows in registers, rows in chunks, columns of rows, codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.norm import triton_norm
from tilewise.quant import encode
from tilewise.testing import norm, operators
from tilewise.testing.norm import BY_NAME, CASES, NormCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)
WIDE = ("rms_1000", "layer_1000", "layer_residual", "rms_residual", "far_from_0", "wide_weight", "layer_alone")


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are wider than what fits."""
    monkeypatch.setattr(triton_norm, "_FORWARD", 32)
    monkeypatch.setattr(triton_norm, "_BACKWARD", 32)
    monkeypatch.setattr(triton_norm, "_COLUMNS", 32)
    monkeypatch.setattr(triton_norm, "_CHUNK", 512)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_pytorch(dtype: torch.dtype, case: NormCase) -> None:
    norm.check(case, dtype, "triton")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_fit(dtype: torch.dtype, name: str) -> None:
    norm.check(BY_NAME[name], dtype, "triton")


@pytest.mark.parametrize("centred", [False, True])
def test_more_tiles_than_programs(centred: bool) -> None:
    norm.check(NormCase("many_rows", (200, 300), centred=centred, bias=centred, residual=True), torch.float32, "triton")


@pytest.mark.parametrize("name", ["rms_residual", "layer_residual"])
def test_nan_stays_in_its_row(name: str) -> None:
    inputs = {k: x.detach() for k, x in norm.make_inputs(BY_NAME[name], torch.float32).items()}
    operators.poisoned(norm.ours(BY_NAME[name], "triton"), inputs, "x", 3)


def check_codes(name: str, quantize: str) -> None:
    case = BY_NAME[name]
    inputs = {k: x.detach() for k, x in norm.make_inputs(case, torch.float16).items()}
    codes, scale, *s = norm.ours(case, "triton", quantize)(**inputs)
    found = norm.ours(replace(case, out=torch.float32), "triton")(**inputs)
    want = encode(found[0] if s else found, quantize)
    assert torch.equal(scale, want.scale)
    assert torch.equal(codes.view(torch.uint8), want.data.view(torch.uint8))
    assert all(torch.equal(*pair) for pair in zip(s, found[1:], strict=False))


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["rms_residual", "layer_1000", "rms_alone", "many_short"])
def test_codes_are_those_of_encode(name: str, quantize: str) -> None:
    check_codes(name, quantize)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("quantize", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["rms_residual", "layer_1000"])
def test_codes_of_rows_that_do_not_fit(name: str, quantize: str) -> None:
    check_codes(name, quantize)


@pytest.mark.parametrize("wide", [False, True])
def test_codes_of_rows_of_zeros_and_nan(wide: bool, request: pytest.FixtureRequest) -> None:
    if wide:
        request.getfixturevalue("chunks")
    x = torch.zeros(3, 600)
    x[1, 2] = torch.nan
    codes, scale = tw.rms_norm(x, quantize="fp8", impl="triton")
    assert not codes.float().any()
    assert scale[0] == scale[2] == 0.0
    assert scale[1].isnan()


@pytest.mark.parametrize("kept", ["x", "residual", "weight", "bias"])
@pytest.mark.parametrize("wide", [False, True])
def test_gradients_of_one_input_alone(wide: bool, kept: str, request: pytest.FixtureRequest) -> None:
    if wide:
        request.getfixturevalue("chunks")
    case = BY_NAME["layer_residual"]
    inputs = norm.make_inputs(case, torch.float32)
    whole = operators.results(norm.ours(case, "triton"), inputs)
    some = operators.results(
        norm.ours(case, "triton"), {k: x.detach().requires_grad_(k == kept) for k, x in inputs.items()}
    )
    assert torch.equal(some[f"d{kept}"], whole[f"d{kept}"])


def test_gradients_of_a_sum_that_is_expanded() -> None:
    x = torch.randn(6, 40, requires_grad=True)
    (found,) = torch.autograd.grad(tw.layer_norm(x, impl="triton").sum(), x)
    assert float(found.abs().max()) < 1e-5


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("rms_64", "layer_64", "rms_residual", "layer_residual", "rms_alone", "offset", "sliced")
    alone = {
        name: operators.results(norm.ours(BY_NAME[name], "triton"), norm.make_inputs(BY_NAME[name], torch.float32))
        for name in names
    }
    monkeypatch.setattr(triton_launch, "remember", True)
    for name in (*names, *names):
        found = operators.results(norm.ours(BY_NAME[name], "triton"), norm.make_inputs(BY_NAME[name], torch.float32))
        assert all(torch.equal(found[key], value) for key, value in alone[name].items()), name


TWINS = [
    ("norm_rows_fwd", "x = tl.where(inside, x - mean[:, None], 0.0)", "x = x - mean[:, None]", "layer_1000"),
    ("norm_rows_fwd", ".to(tl.float32) + offset", ".to(tl.float32)", "offset"),
    ("norm_rows_fwd", "/ width + eps)", "/ BLOCK_W + eps)", "rms_1000"),
    ("norm_rows_bwd", " - total) * rstd", ") * rstd", "layer_1000"),
    ("norm_rows_bwd", "dx += load_rows(DS, row, offs, inside, stride_ds)", "dx += 0.0", "rms_residual"),
    ("norm_rows_bwd", "dw += do * x_hat", "dw = do * x_hat", "many_short"),
    ("norm_rows_bwd", "CENTRED * rows + row", "row", "layer_64"),
    ("norm_weights_bwd", "acc += tl.load", "acc = tl.load", "many_short"),
]


@pytest.mark.parametrize(("kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "many_short":  # more tiles than programs, more parts than a step takes
        monkeypatch.setattr(triton_norm, "_multiprocessors", lambda device: 100)
        monkeypatch.setattr(triton_norm, "_RESIDENT", 4)
        monkeypatch.setattr(triton_norm, "_ELEMENTS", 4)
        monkeypatch.setattr(triton_norm, "_PARTS", 64)
    norm.check(BY_NAME[name], torch.float32, "triton")  # whole, it passes
    copy = broken_copy(triton_norm, old, new, tmp_path)
    monkeypatch.setattr(triton_norm, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        norm.check(BY_NAME[name], torch.float32, "triton")


def check_rounded_sum() -> None:
    x, residual = (torch.randn(6, 40, generator=torch.Generator().manual_seed(n)).half() for n in range(2))
    o, s = tw.rms_norm(x, residual=residual, out_dtype=torch.float32, impl="triton")
    assert torch.equal(s, x + residual)
    assert torch.equal(o, tw.rms_norm(s, out_dtype=torch.float32, impl="triton"))


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_normed_is_the_rounded_sum(wide: bool, request: pytest.FixtureRequest) -> None:
    if wide:
        request.getfixturevalue("chunks")
    check_rounded_sum()


def test_a_twin_that_does_not_round_the_sum_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = broken_copy(triton_norm, ".to(X.dtype.element_ty).to(tl.float32)", "", tmp_path)
    monkeypatch.setattr(triton_norm, "norm_rows_fwd", copy.norm_rows_fwd)
    with pytest.raises(AssertionError):
        check_rounded_sum()


WIDE_TWINS = [
    ("norm_chunks_fwd", "mean_i += delta * (1.0 / (start // CHUNK + 1))", "mean_i += delta / 2", "layer_1000"),
    ("norm_chunks_fwd", "square_i += count_i * apart * apart", "square_i += 0.0", "layer_1000"),
    ("norm_chunks_fwd", "square_i += x * x", "square_i = x * x", "rms_1000"),
    ("norm_sums_bwd", "total += g", "total = g", "layer_1000"),
    ("norm_rows_bwd", "tl.program_id(0) // PROGRAMS * BLOCK_W", "0 * BLOCK_W", "rms_1000"),
]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("kernel", "old", "new", "name"), WIDE_TWINS)
def test_a_broken_twin_of_wide_rows_is_caught(
    kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm.check(BY_NAME[name], torch.float32, "triton")
    copy = broken_copy(triton_norm, old, new, tmp_path)
    monkeypatch.setattr(triton_norm, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        norm.check(BY_NAME[name], torch.float32, "triton")
