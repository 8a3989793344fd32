"""Cases of `rms_norm` and `layer_norm`, and what PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.norm.problem import make_call
from tilewise.ops.norm.table import NORM
from tilewise.ops.operation import Operation
from tilewise.testing import operators

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class NormCase:
    """x of a shape; `sliced` rows lie in wider ones, `transposed` ones have other strides; `wide_weight` is float32
    whatever x is.
    """

    name: str
    shape: tuple[int, ...]
    centred: bool = False
    weight: bool = True
    bias: bool = False
    residual: bool = False
    offset: float = 0.0
    eps: float = 1e-5
    shift: float = 0.0
    wide_weight: bool = False
    sliced: bool = False
    transposed: bool = False
    out: torch.dtype | None = None

    def __repr__(self) -> str:
        return self.name


CASES = [
    *(NormCase(f"rms_{n}", (5, n)) for n in (1, 7, 64, 1000)),
    *(NormCase(f"layer_{n}", (5, n), centred=True, bias=True) for n in (1, 7, 64, 1000)),
    NormCase("vector", (33,)),
    NormCase("many_short", (2, 301, 3), centred=True, bias=True),
    NormCase("rms_alone", (6, 40), weight=False),
    NormCase("layer_alone", (6, 40), centred=True, weight=False),
    NormCase("bias_alone", (6, 40), centred=True, weight=False, bias=True),
    NormCase("rms_residual", (2, 9, 72), residual=True),
    NormCase("layer_residual", (2, 9, 72), centred=True, bias=True, residual=True),
    NormCase("residual_alone", (70, 24), weight=False, residual=True),
    NormCase("offset", (6, 40), offset=1.0),
    NormCase("large_eps", (6, 40), eps=0.5),
    NormCase("far_from_0", (6, 500), centred=True, bias=True, shift=30.0),
    NormCase("wide_weight", (6, 40), centred=True, bias=True, wide_weight=True),
    NormCase("sliced", (2, 7, 48), residual=True, sliced=True),
    NormCase("transposed", (9, 24), residual=True, transposed=True),
    NormCase("float32_out", (5, 70), residual=True, out=torch.float32),
]
BY_NAME = {case.name: case for case in CASES}


def make_inputs(case: NormCase, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Tensors:
    """The tensors of a case by argument; seed 0 would give x the numbers of the gradients that come in."""
    generator = torch.Generator().manual_seed(seed)
    width = case.shape[-1]

    def draw(shape: tuple[int, ...], shift: float, kept: torch.dtype) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) + shift).to(device, kept).requires_grad_()

    weights = torch.float32 if case.wide_weight and dtype != torch.float64 else dtype
    inputs = {"x": draw(case.shape, case.shift, dtype)}
    if case.residual:
        inputs["residual"] = draw(case.shape, 0.0, dtype)
    if case.weight:
        inputs["weight"] = draw((width,), 1.0 - case.offset, weights)
    if case.bias:
        inputs["bias"] = draw((width,), 0.0, weights)
    return inputs


def ours(case: NormCase, impl: str | None, quantize: str | None = None) -> operators.Function:
    """The function under test, of what `make_inputs` gives."""
    function: Any = tw.layer_norm if case.centred else tw.rms_norm

    def lying(x: torch.Tensor) -> torch.Tensor:
        """The checker makes copies that lie otherwise."""
        if case.sliced:
            x = torch.cat([x, x], -1)[..., : x.shape[-1]]
        return x.mT.contiguous().mT if case.transposed else x

    def call(x: torch.Tensor, residual: torch.Tensor | None = None, **weights: torch.Tensor) -> Any:
        residual = None if residual is None else lying(residual)
        options: dict[str, Any] = {"eps": case.eps, "offset": case.offset, "out_dtype": case.out}
        return function(lying(x), residual=residual, quantize=quantize, impl=impl, **options, **weights)

    return call


def plain(case: NormCase) -> operators.Function:
    """The same in PyTorch, at any dtype; between reading and writing all is float32 or wider."""

    def call(
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        s = x if residual is None else x + residual
        wide = torch.promote_types(x.dtype, torch.float32)
        f = s.to(wide)
        if case.centred:
            f = f - f.mean(-1, keepdim=True)
        o = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + case.eps)
        if weight is not None:
            o = o * (weight.to(wide) + case.offset)
        if bias is not None:
            o = o + bias.to(wide)
        o = o.to(x.dtype if case.out is None or wide == torch.float64 else case.out)
        return o if residual is None else (o, s)

    return call


def check(case: NormCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """`case` is as near to the truth as it must be."""
    if dtype == torch.float64:
        case = replace(case, out=None)
    inputs = make_inputs(case, dtype, device)
    operators.check(ours(case, impl), plain(case), inputs, _terms(case, inputs))


_INCOMING = 4.5  # gradients that come in are smaller


def _terms(case: NormCase, inputs: Tensors) -> dict[str, float]:
    """How much larger than the results their terms are together, where these cancel."""
    wide = {name: x.detach().double() for name, x in inputs.items()}
    s = wide["x"] + wide["residual"] if case.residual else wide["x"]
    if not s.numel():
        return {}
    f = s - s.mean(-1, keepdim=True) if case.centred else s
    rstd = torch.rsqrt(f.square().mean(-1, keepdim=True) + case.eps)
    x_hat = (f * rstd).abs()
    weight = wide["weight"] + case.offset if case.weight else torch.ones((), device=s.device)
    # the mean is off by units of itself, and so is what lies near it
    mean = float(s.abs().max()) * rstd.max() if case.centred else 0.0
    o = weight.abs().max() * (x_hat.max() + mean) + (wide["bias"].abs().max() if case.bias else 0.0)
    g = _INCOMING * weight.abs().max() * (1.0 + mean)
    dx = (g * rstd * (2.0 + x_hat * x_hat.mean(-1, keepdim=True))).max() + _INCOMING
    rows = s.numel() / s.shape[-1]
    largest: dict[str, Any] = {"out0": o, "dx": dx, "dresidual": dx, "dweight": _INCOMING * rows * (x_hat.max() + mean),
               "dbias": _INCOMING * rows}  # fmt: skip
    found = operators.results(plain(replace(case, out=None)), {k: x.requires_grad_() for k, x in wide.items()})
    return {name: float(size / found[name].abs().max().clamp(min=operators.LEAST)) for name, size in largest.items()
            if name in found}  # fmt: skip


def _variant(
    *, centred: bool, residual: bool = False, quantize: str | None = None
) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        x, other = (torch.zeros(512, width, dtype=dtype, requires_grad=quantize is None) for _ in range(2))
        weight, bias = (torch.ones(width, dtype=dtype, requires_grad=quantize is None) for _ in range(2))
        added = other if residual else None
        return NORM, make_call(x, weight, bias if centred else None, added, centred, 1e-5, 0.0, None, quantize)

    return make


VARIANTS = {
    "rms": _variant(centred=False),
    "rms residual": _variant(centred=False, residual=True),
    "rms fp8": _variant(centred=False, quantize="fp8"),
    "layer": _variant(centred=True),
    "layer residual": _variant(centred=True, residual=True),
    "layer int8": _variant(centred=True, quantize="int8"),
}
