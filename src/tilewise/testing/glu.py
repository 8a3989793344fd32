"""Cases of gated linear units, and what PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import tilewise as tw
from tilewise.ops.glu.problem import make_call
from tilewise.ops.glu.table import GLU
from tilewise.ops.operation import Operation
from tilewise.testing import operators

Tensors = dict[str, torch.Tensor]
KINDS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class GluCase:
    """gate and up of a shape, in one tensor if `packed`; `sliced` rows lie in wider ones."""

    name: str
    shape: tuple[int, ...]
    packed: bool = False
    sliced: bool = False

    def __repr__(self) -> str:
        return self.name


CASES = [
    *(GluCase(f"width_{n}", (5, n)) for n in (1, 7, 64, 1000, 2049)),
    *(GluCase(f"packed_{n}", (3, 2, n), packed=True) for n in (1, 7, 64, 1000, 2049)),
    GluCase("vector", (33,)),
    GluCase("many_short", (2, 301, 3), packed=True),
    GluCase("sliced", (2, 7, 48), sliced=True),
    GluCase("packed_sliced", (2, 7, 48), packed=True, sliced=True),
]
BY_NAME = {case.name: case for case in CASES}


def make_inputs(case: GluCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """gate, and up where it is a tensor of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in ("gate",) if case.packed else ("gate", "up"):
        shape = (*case.shape[:-1], 2 * case.shape[-1]) if case.packed else case.shape
        found[name] = (3.0 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
    return found


def ours(case: GluCase, kind: str, impl: str | None) -> operators.Function:
    """The function under test, of what `make_inputs` gives."""

    def call(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        if case.sliced:
            gate, up = F.pad(gate, (8, 0))[..., 8:], None if up is None else F.pad(up, (8, 0))[..., 8:]
        if kind.startswith("gelu"):
            return tw.geglu(gate, up, approximate="tanh" if kind == "gelu_tanh" else "none", impl=impl)
        return (tw.swiglu if kind == "silu" else tw.reglu)(gate, up, impl=impl)

    return call


def plain(kind: str) -> operators.Function:
    """The same in PyTorch, at any dtype."""

    def call(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        if up is None:
            gate, up = gate.chunk(2, -1)
        if kind.startswith("gelu"):
            return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up
        return (F.silu if kind == "silu" else F.relu)(gate) * up

    return call


def check(case: GluCase, dtype: torch.dtype, kind: str, impl: str, device: str = "cpu") -> None:
    """`case` is as near to the truth as it must be."""
    inputs = make_inputs(case, dtype, device)
    # float64's truth has 1 - tanh^2, and its roundoff is multiplied by up to so much
    terms = {"dgate": 100.0} if kind == "gelu_tanh" and dtype == torch.float64 else {}
    operators.check(ours(case, kind, impl), plain(kind), inputs, terms)


def check_nan(kind: str, packed: bool, impl: str) -> None:
    """NaN is where PyTorch has it, in gradients too: what stands before a gate that relu closes is not looked at."""
    case = GluCase("nan", (4, 24), packed)
    for column in (3, -3):
        inputs = make_inputs(case, torch.float32)
        with torch.no_grad():
            for x in inputs.values():
                x[1, column] = torch.nan
        operators.check(ours(case, kind, impl), plain(kind), inputs)


def check_rounded_gelu(dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """At 16 bits gelu is the exact one, rounded, but for 4e-7 of what it multiplies: also where it is near 0."""
    gate = torch.linspace(-6.0, 6.0, 20001, device=device).to(dtype)
    o = tw.geglu(gate, torch.ones_like(gate), impl=impl).double()
    want = F.gelu(gate.double())
    unit = torch.finfo(dtype).eps / 2
    allowed = (
        (1.0 + 2**-10) * unit * want.abs() + 4e-7 * gate.double().abs() + torch.finfo(dtype).smallest_normal * unit
    )
    assert bool(((o - want).abs() <= allowed).all())


def _variant(kind: str, packed: bool) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        gate = torch.zeros(64, width * (1 + packed), dtype=dtype, requires_grad=True)
        return GLU, make_call(gate, None if packed else torch.zeros_like(gate, requires_grad=True), kind)

    return make


VARIANTS = {kind: _variant(kind, packed=kind != "gelu") for kind in KINDS}
