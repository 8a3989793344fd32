"""Cases of `softmax` and `log_softmax`, and what PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.softmax.problem import make_call
from tilewise.ops.softmax.table import SOFTMAX
from tilewise.testing import operators

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SoftmaxCase:
    """x of a shape; a mask of another one, a third of it hidden and its first row wholly; `sliced` rows lie in wider
    ones, `transposed` ones have other strides.
    """

    name: str
    shape: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    temperature: float = 1.0
    dim: int = -1
    sliced: bool = False
    transposed: bool = False
    out: torch.dtype | None = None

    def __repr__(self) -> str:
        return self.name


CASES = [
    *(SoftmaxCase(f"width_{n}", (5, n)) for n in (1, 7, 63, 64, 1000)),
    SoftmaxCase("vector", (33,)),
    SoftmaxCase("many_short", (2, 301, 3)),
    SoftmaxCase("mask", (6, 40), (6, 40)),
    SoftmaxCase("mask_of_columns", (2, 3, 5, 24), (24,)),
    SoftmaxCase("mask_of_batch", (2, 3, 5, 24), (2, 1, 1, 24)),
    SoftmaxCase("mask_of_rows", (2, 3, 5, 24), (2, 1, 5, 1)),
    SoftmaxCase("mask_between", (2, 3, 2, 3, 8), (2, 1, 2, 1, 8)),
    SoftmaxCase("hot", (4, 50), temperature=3.0),
    SoftmaxCase("cold", (4, 50), (4, 50), temperature=0.3),
    SoftmaxCase("first_dim", (21, 4), (21, 1), dim=0),
    SoftmaxCase("sliced", (2, 7, 48), (7, 48), sliced=True),
    SoftmaxCase("transposed", (9, 24), transposed=True),
    SoftmaxCase("float32_out", (5, 70), out=torch.float32),
]
BY_NAME = {case.name: case for case in CASES}


def make_inputs(case: SoftmaxCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """x, and the mask where there is one."""
    generator = torch.Generator().manual_seed(seed)
    shape = case.shape[::-1] if case.transposed else case.shape
    if case.sliced:
        shape = (*shape[:-1], shape[-1] + 16)
    x = (3.0 * torch.randn(shape, generator=generator)).to(device, dtype)
    x = x.mT if case.transposed else x[..., 16:] if case.sliced else x
    inputs = {"x": x.requires_grad_()}
    if case.mask is not None:
        keep = torch.rand(case.mask, generator=generator) > 0.3
        if len(case.mask) > 1:  # one of columns would hide every row
            keep.flatten(0, -2)[0] = False
        inputs["mask"] = keep.to(device)
    return inputs


def ours(case: SoftmaxCase, log: bool, impl: str | None) -> operators.Function:
    """The function under test, of what `make_inputs` gives."""
    function = tw.log_softmax if log else tw.softmax

    def call(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        # the checker makes copies that lie otherwise
        if case.sliced:
            x = torch.cat([x, x[..., :16]], -1)[..., : x.shape[-1]]
        x = x.mT.contiguous().mT if case.transposed else x
        return function(x, case.dim, mask=mask, temperature=case.temperature, dtype=case.out, impl=impl)

    return call


def plain(case: SoftmaxCase, log: bool) -> operators.Function:
    """The same in PyTorch, at any dtype."""

    def call(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        s = x / case.temperature
        if case.out is not None and x.dtype != torch.float64:
            s = s.to(case.out)
        keep = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand(x.shape)
        some = keep.any(case.dim, keepdim=True)
        s = torch.where(keep, s, torch.where(some, -torch.inf, 0.0).to(s.dtype))
        if log:
            return torch.where(keep, torch.log_softmax(s, case.dim), -torch.inf)
        return torch.where(keep, torch.softmax(s, case.dim), 0.0)

    return call


def check(case: SoftmaxCase, dtype: torch.dtype, log: bool, impl: str, device: str = "cpu") -> None:
    """`case` is as near to the truth as it must be."""
    inputs = make_inputs(case, dtype, device)
    largest = 1.0 + float(inputs["x"].detach().abs().max()) / case.temperature
    dx = float(operators.results(plain(case, log), inputs)["dx"].abs().max())
    # a term of dx is o do, of a do below 4
    terms = {"out0": largest, "dx": max(largest, 8.0 / dx if dx else 0.0)}
    # dx is o (do - sum of o do) / temperature of an o that was rounded: by a quarter of 8, and by the sum, which is 4
    kept = {"dx": 0.0 if log else 6.0 / case.temperature * torch.finfo(case.out or dtype).eps / 2}
    operators.check(ours(case, log, impl), plain(case, log), inputs, terms, kept)


def _variant(log: bool, masked: bool) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        x = torch.zeros(64, width, dtype=dtype, requires_grad=True)
        mask = torch.ones(width, dtype=torch.bool) if masked else None
        return SOFTMAX, make_call(x, -1, mask, 1.0, None, log)

    return make


VARIANTS = {
    "plain": _variant(log=False, masked=False),
    "masked": _variant(log=False, masked=True),
    "log": _variant(log=True, masked=False),
}
