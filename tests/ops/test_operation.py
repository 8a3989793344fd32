"""An operation made of a call, rows and two functions: eager, compiled, kept tensors, empty calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.core import dispatch
from tilewise.core.dispatch import Row
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.operation import Operation


@dataclasses.dataclass(eq=False)
class Call:
    """o = scale x^2 y, or scale x^2 without a y; `dtype` of o."""

    x: torch.Tensor
    y: torch.Tensor | None
    scale: float
    dtype: torch.dtype
    name: str = "none"


seen: list[dict[str, torch.Tensor]] = []


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    results["square"].copy_(call.x * call.x)
    other = 1.0 if call.y is None else call.y
    results["o"].copy_(call.scale * results["square"] * other)


def backward(
    call: Call,
    kept: dict[str, torch.Tensor],
    incoming: Sequence[torch.Tensor],
    gradients: dict[str, torch.Tensor],
) -> None:
    seen.append(kept)
    (do,) = incoming
    for name, gradient in gradients.items():
        other = 1.0 if call.y is None else call.y
        gradient.copy_(call.scale * do * (2 * kept["x"] * other if name == "x" else kept["square"]))


HERE = "tests.ops.test_operation"
ROWS: tuple[Row[Call], ...] = (
    Row("cpu", HERE, (dispatch.on("cpu", lambda call: call.x.device),), "", backward="backward"),
    Row("elsewhere", HERE, (dispatch.on("meta", lambda call: call.x.device),), "", backward="backward"),
)
toy = Operation(
    "toy",
    Call,
    ROWS,
    results=lambda call: {
        "o": torch.empty(call.x.shape, dtype=call.dtype, device=call.x.device),
        "square": torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device),
    },
    gradients=lambda call, kept, wanted: {name: torch.empty_like(kept["x"]) for name in wanted},
    keeps=("x", "y", "square"),
)


def run(x: torch.Tensor, y: torch.Tensor | None, scale: float = 3.0) -> torch.Tensor:
    return toy(Call(x, y, scale, torch.float32))[0]


@pytest.fixture(params=["eager", "compiled"])
def called(request: pytest.FixtureRequest):
    return run if request.param == "eager" else torch.compile(run, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("second", [True, False])
def test_forward_and_gradients(called, second: bool) -> None:
    x = torch.randn(5, requires_grad=True)
    y = torch.randn(5, requires_grad=True) if second else None
    do = torch.randn(5)
    o = called(x, y)
    assert torch.equal(o, 3.0 * (x * x) * (y if second else 1.0))
    wanted = [x] if y is None else [x, y]
    found = torch.autograd.grad(o, wanted, do)
    torch.testing.assert_close(found[0], 6.0 * do * x * (y if second else 1.0))
    if second:
        torch.testing.assert_close(found[1], 3.0 * do * x * x)


def test_only_wanted_gradients_are_made(called) -> None:
    x, y = torch.randn(3), torch.randn(3, requires_grad=True)
    called(x, y).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(y.grad, 3.0 * x * x)


def test_the_backward_is_given_what_is_kept(called) -> None:
    called(torch.randn(3, requires_grad=True), None).sum().backward()
    assert sorted(seen[-1]) == ["square", "x"]


def test_the_backward_makes_nothing_but_gradients() -> None:
    """No zeros as large as results that no one is given, which a linear layer's loss would pay with its memory."""

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    o = run(torch.randn(3, requires_grad=True), None)
    with Made():
        o.backward(torch.ones(3))
    assert not [name for name in names if "zeros" in name]
    assert sum("empty" in name for name in names) == 1


def test_empty_calls_run_nothing(called) -> None:
    x = torch.zeros(0, requires_grad=True)
    before = len(seen)
    o = called(x, None)
    o.sum().backward()
    assert o.shape == (0,)
    assert x.grad.shape == (0,)
    assert len(seen) == before


def test_without_gradients_nothing_is_connected(called) -> None:
    with torch.no_grad():
        assert not called(torch.randn(3, requires_grad=True), None).requires_grad


def test_numbers_may_be_symbols() -> None:
    """Which torch.compile makes of numbers that change."""
    scaled = torch.compile(lambda x, scale: run(x, None, scale), backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(3)
    for scale in (2.0, 3.0):
        torch.testing.assert_close(scaled(x, scale), scale * x * x)


def test_names_of_rows() -> None:
    call = Call(torch.randn(3), None, 1.0, torch.float32)
    with pytest.raises(InputError, match="impl: got 'other'"):
        toy(call, "other")
    with pytest.raises(UnsupportedError, match=r"tensors on meta \(got cpu\)"):
        toy(call, "elsewhere")


both = dataclasses.replace(toy, name="toy_both", outputs=lambda call: 1 + (call.y is None), alike={"y": "x"})


@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_follow_the_call_and_a_gradient_may_be_another_fields(compiled: bool) -> None:
    def run_both(x: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return both(Call(x, y, 3.0, torch.float32))

    called = torch.compile(run_both, backend="aot_eager", fullgraph=True) if compiled else run_both
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    assert len(called(x.detach(), None)) == 2
    (o,) = called(x, y)
    dx, dy = torch.autograd.grad(o, (x, y), torch.ones(5))
    assert torch.equal(dx, dy)
    torch.testing.assert_close(dx, 6.0 * x * y)
    (o,) = called(x.detach(), y)
    assert torch.equal(torch.autograd.grad(o, y, torch.ones(5))[0], dx)


def test_operators_pass_opcheck() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    how = "(['x', 'y'], {'scale': 2.0, 'dtype': 'torch.float32', 'name': 'none'})"
    torch.library.opcheck(torch.ops.tilewise.toy.default, ([x, y], how, "cpu"))
