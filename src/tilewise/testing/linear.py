"""Cases of `linear`, what PyTorch makes of them, and its promise: bits of a row that no other row changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from tilewise.ops.linear import linear
from tilewise.ops.linear.problem import make_call
from tilewise.ops.linear.table import LINEAR
from tilewise.ops.operation import Operation
from tilewise.testing import operators

Tensors = dict[str, torch.Tensor]
Layer = Callable[[torch.Tensor], torch.Tensor]
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class LinearCase:
    """x of a shape; `sliced` rows of x and of weight lie in wider ones, 16 bytes from their beginning; `odd` ones are 1
    number further apart than they are wide; `transposed` ones have no unit stride.
    """

    name: str
    shape: tuple[int, ...]
    out_features: int
    bias: bool = True
    out: torch.dtype | None = None
    sliced: bool = False
    odd: bool = False
    transposed: bool = False

    def __repr__(self) -> str:
        return self.name


CASES = [
    LinearCase("one_number", (3, 1), 1),
    LinearCase("one_column", (70, 40), 1),
    LinearCase("one_term", (5, 1), 70),
    LinearCase("vector", (33,), 20),
    LinearCase("no_bias", (2, 9, 64), 64, bias=False),
    LinearCase("float32_out", (5, 72), 40, out=torch.float32),
    LinearCase("odd_sizes", (67, 131), 77),
    LinearCase("two_features", (5, 1254), 2),
    LinearCase("long", (3, 1000), 48, out=torch.float32),
    LinearCase("many_rows", (2, 300, 24), 70),
    LinearCase("sliced", (2, 7, 48), 40, sliced=True),
    LinearCase("sliced_odd", (7, 45), 40, sliced=True),
    LinearCase("odd", (7, 48), 40, odd=True),
    LinearCase("transposed", (9, 25), 33, transposed=True),
]
BY_NAME = {case.name: case for case in CASES}


def make_inputs(case: LinearCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """The tensors of a case by argument."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": case.shape, "weight": (case.out_features, case.shape[-1])}
    shapes |= {"bias": (case.out_features,)} if case.bias else {}
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}


def ours(case: LinearCase, impl: str | None) -> operators.Function:
    """The function under test, of what `make_inputs` gives."""

    def lying(x: torch.Tensor) -> torch.Tensor:
        """The checker makes copies that lie otherwise."""
        before = 16 // x.element_size()
        if case.sliced:
            x = F.pad(x, (before, 0), value=torch.nan)[..., before:]
        if case.odd:
            x = F.pad(x, (0, 1), value=torch.nan)[..., :-1]
        return x.mT.contiguous().mT if case.transposed and x.ndim > 1 else x

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        bias = None if bias is None else lying(bias)
        return linear(lying(x), lying(weight), bias, out_dtype=case.out, impl=impl)

    return call


def plain(case: LinearCase) -> Callable[..., torch.Tensor]:
    """The same in PyTorch, at any dtype; between reading and writing all is float32 or wider."""

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        o = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        return o.to(x.dtype if case.out is None or wide == torch.float64 else case.out)

    return call


def check(case: LinearCase, dtype: torch.dtype, impl: str | None, device: str = "cpu") -> None:
    """`case` is as near to the truth as it must be."""
    inputs = make_inputs(case, dtype, device)
    sizes = plain(case)(**{name: x.double().abs() for name, x in inputs.items()})
    truth = plain(case)(**{name: x.double() for name, x in inputs.items()})
    terms = float(sizes.max() / truth.abs().max().clamp(min=operators.LEAST)) if sizes.numel() else 1.0
    operators.check(ours(case, impl), plain(case), inputs, {"out0": terms})


# the promise ---------------------------------------------------------------------------------------------------------


def check_invariance(layer: Layer, x: torch.Tensor, numbers: Sequence[int], seed: int = 0) -> None:
    """The rows of x (rows, in_features) have the bits that each has alone: in every number of these rows, at random
    places, however they lie, and whatever is in the others.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = torch.cat([layer(row[None]) for row in x])
    for count in numbers:
        chosen = torch.randint(len(x), (count,), generator=generator).to(x.device)
        among = x[chosen]
        _same_bits(layer(among), whole[chosen], f"{count} rows")
        wider = F.pad(among, (16, 16), value=torch.nan)[:, 16:-16]
        _same_bits(layer(wider), whole[chosen], f"{count} rows of a wider tensor")
        place = int(torch.randint(count, (1,), generator=generator))
        among[torch.arange(count, device=x.device) != place] = torch.nan
        _same_bits(layer(among)[place], whole[chosen[place]], f"place {place} of {count}, others NaN")


def _same_bits(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    kind = _BITS[want.element_size()]
    wrong = (got.view(kind) != want.view(kind)).sum()
    assert not wrong, f"{int(wrong)} of {want.numel()} numbers have other bits: {where}"


def layer_of(
    out_features: int, in_features: int, dtype: torch.dtype, impl: str | None, device: str = "cpu", bias: bool = True,
    out: torch.dtype | None = None,
) -> Layer:  # fmt: skip
    """A layer with random weights."""
    case = LinearCase("layer", (1, in_features), out_features, bias)
    inputs = make_inputs(case, dtype, device)
    return lambda x: linear(x, inputs["weight"], inputs.get("bias"), out_dtype=out, impl=impl)


def rows_of(count: int, in_features: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Random rows, of different sizes."""
    generator = torch.Generator().manual_seed(count + in_features)
    sizes = torch.randn(count, 1, generator=generator).exp()
    return (sizes * torch.randn(count, in_features, generator=generator)).to(device, dtype)


# what is compiled without a GPU --------------------------------------------------------------------------------------


def _variant(
    sizes_of: Callable[[int], tuple[int, int]], *, bias: bool = False, out: torch.dtype | None = None
) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    """Of (out_features, in_features) for a width."""

    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        out_features, in_features = sizes_of(width)
        x = torch.zeros(64, in_features, dtype=dtype)
        added = torch.zeros(out_features, dtype=dtype) if bias else None
        return LINEAR, make_call(x, x[:1].expand(out_features, in_features), added, out)

    return make


VARIANTS = {
    "narrow": _variant(lambda width: (1024, width), bias=True),
    "wide": _variant(lambda width: (8192, width)),
    "head": _variant(lambda width: (40 * width, 1024), out=torch.float32),
    "odd": _variant(lambda width: (1024, width + 1)),
}
