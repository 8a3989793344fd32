"""Means of tiles on a CPU: against PyTorch in float64, errors, operators, properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.errors import InputError
from tilewise.ops.tile_means import tile_means
from tilewise.testing import tile_means as cases
from tilewise.testing.tile_means import CASES, MeansCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: MeansCase, impl: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, impl)


@given(
    block=st.integers(1, 70),
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 8, 33]),
    packed=st.booleans(),
)
def test_any_shape(block: int, lengths: list[int], heads: int, dim: int, packed: bool) -> None:
    lengths = lengths if packed else lengths[:1] * 2
    cases.check(MeansCase("any", block, tuple(lengths), heads, dim, packed), torch.float32, "cpu")


def test_similarity_of_equal_and_of_opposite_rows() -> None:
    row = torch.tensor([3.0, 4.0])
    x = torch.stack([row, row, row, -row])[None, :, None]
    _, similarity = tile_means(x, 2, similarity=True)
    torch.testing.assert_close(similarity, torch.tensor([[[1.0, 0.0]]]))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(("length", "similarity"), [(2.0**-62, 1.0), (2.0**-64, 0.0), (0.0, 0.0)])
def test_rows_of_nearly_nothing_have_no_direction(impl: str, length: float, similarity: float) -> None:
    x = torch.full((1, 4, 1, 1), length)
    assert tile_means(x, 4, similarity=True, impl=impl)[1].item() == similarity


def test_nan_stays_in_its_tile() -> None:
    x, _ = cases.make_input(cases.BY_NAME["halves"], torch.float32)
    with torch.no_grad():
        x[1, 45, 2, 3] = torch.nan
        found = tile_means(x, 40, similarity=True, variance=True)
    for part in found:
        bad = part.isnan().flatten(3).any(-1) if part.ndim == 4 else part.isnan()
        assert bad.nonzero().tolist() == [[1, 2, 1]]


def test_compiled_whole() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return tile_means(x, 16, similarity=True)[0] * 2

    x, _ = cases.make_input(cases.BY_NAME["odd_dim"], torch.float32)
    found = torch.compile(double, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, double(x))
    for got, want in zip(torch.autograd.grad(found.sum(), x), torch.autograd.grad(double(x).sum(), x), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("x", "block", "name"),
    [
        (torch.zeros(4, 3, 2), 16, "x"),
        (torch.zeros(1, 4, 3, 2, dtype=torch.int32), 16, "x"),
        ("queries", 16, "x"),
        (torch.zeros(1, 4, 3, 2, 2)[..., 0], 16, "x"),
        (torch.zeros(1, 4, 3, 2), 0, "block"),
        (torch.zeros(1, 4, 3, 2), 16.0, "block"),
        (torch.zeros(1, 4, 3, 2), True, "block"),
    ],
)
def test_errors(x: object, block: object, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: got"):
        tile_means(x, block)  # type: ignore[arg-type]
