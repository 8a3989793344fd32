"""Whatever head dimensions, dtype and formula: a kernel's tiles fit the shared memory that a block has.

A configuration holds for all head dimensions up to a width and takes most at the width, so the model looks there; the
compiler has the last word at the corners, with a formula that takes more than others.
"""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.ops.attention import configs
from tilewise.ops.attention.problem import Call, make_call
from tilewise.quant import encode
from tilewise.testing.offline import SHARED_LIMIT, compile_call

ROWS = [(key, row) for key, rows in configs._TABLE.items() for row in rows]


def bytes_of(kernel: str, row: configs.Row, itemsize: int, stages: int) -> int:
    """What a kernel's tiles take at the row's width, with so many stages of those that come in turn."""
    m, n, width = row.config.block_m, row.config.block_n, row.width
    if kernel == "forward":
        numbers = m * width + stages * n * 2 * width  # queries; keys and values
    elif kernel == "queries":
        numbers = m * 2 * width + stages * n * 2 * width + m * n  # queries, dO; keys and values; dS
    else:
        numbers = n * 2 * width + stages * m * 2 * width + 2 * m * n  # keys and values; queries, dO; P, dS
    return numbers * itemsize


@pytest.mark.parametrize(("key", "row"), ROWS, ids=str)
def test_every_configuration_has_room(key: tuple[str, int, int], row: configs.Row) -> None:
    """With its stages for a plain call; with one, which is left where a formula takes more, a fifth is free."""
    kernel, sm, itemsize = key
    assert bytes_of(kernel, row, itemsize, row.config.stages) <= SHARED_LIMIT[sm]
    assert bytes_of(kernel, row, itemsize, 1) <= 0.82 * SHARED_LIMIT[sm]


def test_every_head_dimension_has_a_configuration() -> None:
    for kernel, sm, itemsize in configs._TABLE:
        for dim in range(1, 513):
            for other in (1, dim, 512):
                assert configs.config(kernel, sm, dim, other, itemsize) in {
                    row.config for row in configs._TABLE[kernel, sm, itemsize] if row.width >= max(dim, other)
                }


def dense(dtype: torch.dtype, dim: int, dim_v: int) -> Call:
    """A call whose formula keeps a table's gradients, random words and lists of tiles beside the tiles."""
    q, k, v = (torch.zeros(1, 200, 2, d, dtype=dtype, requires_grad=True) for d in (dim, dim, dim_v))
    table = torch.zeros(401, 2, requires_grad=True)
    score = tw.score(lambda s, b, h, i, j: torch.tanh(s + table[i - j + 200, h]) * 5.0)
    return make_call(q, k, v, mask=tw.document(torch.zeros(200, dtype=torch.int32)), score=score, dropout=0.1, seed=1)


def paged(dtype: torch.dtype, dim: int, dim_v: int) -> Call:
    q = torch.zeros(2, 70, 2, dim, dtype=dtype)
    k, v = (torch.zeros(8, 16, 1, d, dtype=dtype) for d in (dim, dim_v))
    layout = tw.Paged(torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 64, dtype=torch.int32))
    return make_call(q, encode(k, "int8"), encode(v, "int8"), layout=layout, score=tw.softcap(5.0))


CORNERS = [(512, 512), (16, 512), (256, 256), (100, 100), (2, 2)]
HALF, FLOAT = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize(("sm", "dim", "dim_v"), [(80, 512, 512), *((90, *corner) for corner in CORNERS)])
def test_corners_compile(sm: int, dim: int, dim_v: int, dtype: torch.dtype) -> None:
    for kernel in compile_call(dense(dtype, dim, dim_v), sm):
        assert kernel.shared_bytes <= SHARED_LIMIT[sm]


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), CORNERS)
def test_corners_over_pages_compile(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    for kernel in compile_call(paged(dtype, dim, dim_v), 90, "triton_paged"):
        assert kernel.shared_bytes <= SHARED_LIMIT[80]


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), CORNERS)
def test_corners_of_decoding_compile(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.zeros(2, rows, 2, d, dtype=dtype) for rows, d in ((3, dim), (500, dim), (500, dim_v)))
    for kernel in compile_call(make_call(q, k, v, score=tw.softcap(5.0)), 80, "triton_decode"):
        assert kernel.shared_bytes <= 99 * 1024  # of sm_86 and sm_89, too
