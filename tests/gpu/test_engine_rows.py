"""What the engine computes of one row has the same bits however many rows there are, operation by operation: a kernel
whose tile depends on the number of rows may sum in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.ops.glu import swiglu
from tilewise.ops.linear import linear
from tilewise.ops.norm import rms_norm
from tilewise.ops.qkv_prologue import qkv_prologue

ROWS = 4000
FEW = (1, 2, 3, 5, 17, 33, 65, 300)
Operation = Callable[[slice], tuple[torch.Tensor, ...]]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()


def normed(width: int) -> Operation:
    x, residual, weight = draw(ROWS, width), draw(ROWS, width, seed=1), draw(width, seed=2)

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        found = rms_norm(x[rows], weight, residual=residual[rows])
        assert isinstance(found, tuple)
        return found

    return run


def gated(width: int) -> Operation:
    x = draw(ROWS, 2 * width)
    return lambda rows: (swiglu(x[rows]),)


def projected(width: int, dtype: torch.dtype) -> Operation:
    x, weight = draw(ROWS, 512), draw(width, 512, seed=1)
    return lambda rows: (linear(x[rows], weight, out_dtype=dtype),)


def prepared(dim: int) -> Operation:
    qkv, norms = draw(ROWS, 8 + 4, dim), [draw(dim, seed=n) for n in (1, 2)]
    pages = [torch.zeros(ROWS // 16, 16, 2, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    cos, sin = (x.to(DEVICE) for x in tw.rope_tables(dim, ROWS))
    places = torch.arange(ROWS, device=DEVICE)

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        rope = tw.Rope(cos, sin, places[rows])
        q = qkv_prologue(qkv[rows], pages[0], pages[1], places[rows], rope=rope, q_norm=norms[0], k_norm=norms[1])
        return (q, *(x.view(ROWS, 2, dim)[rows].clone() for x in pages))

    return run


def sampled(*names: str, logprobs: int | None = None) -> Operation:
    logits, places = 5 * draw(ROWS, 4096).float(), torch.arange(ROWS, device=DEVICE, dtype=torch.int32)
    of = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    columns: dict[str, Any] = {name: torch.full((ROWS,), of[name], device=DEVICE) for name in names}
    if "top_k" in columns:
        columns["top_k"] = columns["top_k"].int()

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        own = {name: x[rows].contiguous() for name, x in columns.items()}
        found = tw.sample(logits[rows], seeds=places[rows].long(), positions=places[rows], logprobs=logprobs, **own)
        return tuple(x for x in found if x is not None)

    return run


OPERATIONS: dict[str, Callable[[], Operation]] = {
    **{f"rms_norm_{width}": partial(normed, width) for width in (64, 128, 512, 1024, 4096, 8192)},
    **{f"swiglu_{width}": partial(gated, width) for width in (512, 3072)},
    "linear": partial(projected, 768, torch.bfloat16),
    "linear_to_float32": partial(projected, 4096, torch.float32),
    **{f"qkv_prologue_{dim}": partial(prepared, dim) for dim in (64, 128)},
    "sample_drawn": partial(sampled, "temperature"),
    "sample_cut": partial(sampled, "temperature", "top_k", "top_p", "min_p"),
    "sample_logprobs": partial(sampled, "temperature", logprobs=3),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_bits_of_a_row_do_not_depend_on_others(name: str) -> None:
    run = OPERATIONS[name]()
    whole = [x.clone() for x in run(slice(0, ROWS))]
    for count in FEW:
        for first in range(0, ROWS - count, ROWS // 8):
            rows = slice(first, first + count)
            for part, want in zip(run(rows), whole, strict=True):
                assert torch.equal(part, want[rows]), (count, first)
