"""Cases of `swiglu`, `geglu` and `reglu`, and what PyTorch makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.glu.problem import make_call
from tilewise.ops.glu.table import GLU
from tilewise.ops.operation import Operation
from tilewise.testing import operators

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class GluCase:
    """o of a shape; `lies` says how its inputs do: "packed", in "wider" rows, "misaligned", "transposed", or
    apart and contiguous.
    """

    name: str
    shape: tuple[int, ...]
    lies: str = ""

    def __repr__(self) -> str:
        return self.name


_SHAPES = {
    "one": (3, 1),
    "narrow": (301, 3),
    "seven": (5, 7),
    "odd": (4, 1001),
    "vectors": (3, 72),
    "vector": (33,),
    "wide": (2, 3, 2600),
}
CASES = [
    *(GluCase(name, shape) for name, shape in _SHAPES.items()),
    *(GluCase(f"{name}_packed", shape, "packed") for name, shape in _SHAPES.items()),
    GluCase("wider", (2, 5, 48), "wider"),
    GluCase("wider_odd", (9, 13), "wider"),
    GluCase("misaligned", (7, 64), "misaligned"),
    GluCase("transposed", (24, 9), "transposed"),
]
BY_NAME = {case.name: case for case in CASES}

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": tw.swiglu,
    "gelu": tw.geglu,
    "gelu_tanh": functools.partial(tw.geglu, approximate="tanh"),
    "relu": tw.reglu,
}
_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
}


def make_inputs(case: GluCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """gate and up, or the packed gate: numbers out to where every activation is flat."""
    generator = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(case.shape, generator=generator) for _ in range(2))
    gate *= 3.0
    if case.lies == "packed":
        return {"gate": torch.cat((gate, up), -1).to(device, dtype).requires_grad_()}
    return {name: x.to(device, dtype).requires_grad_() for name, x in (("gate", gate), ("up", up))}


def ours(case: GluCase, activation: str, impl: str | None) -> operators.Function:
    """The function under test, of what `make_inputs` gives, which is laid here: checkers make copies."""
    function = functools.partial(ACTIVATIONS[activation], impl=impl)

    def call(**tensors: torch.Tensor) -> torch.Tensor:
        return function(**{name: laid(x, case.lies) for name, x in tensors.items()})

    return call


def laid(x: torch.Tensor, lies: str) -> torch.Tensor:
    """The same numbers in other memory."""
    if lies == "wider":
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    if lies == "misaligned":
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    if lies == "transposed":
        return x.mT.contiguous().mT
    return x


def plain(case: GluCase, activation: str) -> operators.Function:
    """The same in PyTorch, at any dtype."""

    def call(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        first, second = gate.chunk(2, -1) if up is None else (gate, up)
        return _PLAIN[activation](first) * second

    return call


def check(case: GluCase, dtype: torch.dtype, activation: str, impl: str, device: str = "cpu") -> None:
    """`case` is as near to the truth as it must be."""
    # in the truth, roundoff of 1 - tanh^2 is multiplied by up to so much
    terms = {"dgate": 100.0} if activation == "gelu_tanh" and dtype == torch.float64 else {}
    operators.check(ours(case, activation, impl), plain(case, activation), make_inputs(case, dtype, device), terms)


def _variant(activation: str, packed: bool) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        gate = torch.zeros(64, 2 * width if packed else width, dtype=dtype, requires_grad=True)
        up = None if packed else torch.zeros_like(gate, requires_grad=True)
        return GLU, make_call(gate, up, activation)

    return make


VARIANTS = {
    "silu": _variant("silu", packed=False),
    "packed": _variant("silu", packed=True),
    "gelu": _variant("gelu", packed=True),
    "tanh": _variant("gelu_tanh", packed=True),
    "relu": _variant("relu", packed=True),
}
