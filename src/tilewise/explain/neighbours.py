"""What stands beside attention in a model: the library's operations, the same in PyTorch, and the bytes they must move.

`python -m benchmarks neighbours` and `tilewise bench neighbours` time them; `passes` counts what PyTorch moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import tilewise as tw

HEAD_DIM = 128

Tensors = dict[str, torch.Tensor]
Function = Callable[..., Any]
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Neighbour:
    """An operation: inputs by name for (rows, width); ours, which takes them and `impl` by name; the same in PyTorch,
    which takes them in order. `forward` and `backward` count tensors as large as x that are read or written at least:
    what is needed once, what comes out once.
    """

    operation: str  # its folder in `tilewise.ops`
    make: Callable[[int, int], Tensors]
    ours: Function
    plain: Function
    forward: float
    backward: float


def placed(inputs: Tensors, device: torch.device | str, dtype: torch.dtype) -> Tensors:
    """The inputs on a device, those with gradients in `dtype`."""
    return {
        name: x.detach().to(device, dtype).requires_grad_() if x.is_floating_point() else x.to(device)
        for name, x in inputs.items()
    }


def outputs_of(found: Any) -> Outputs:
    """The results of a function, one or several."""
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def incoming(outputs: Outputs, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of the outputs, alike for whoever computes these, numbers that `dtype` holds."""
    made = (torch.cos(torch.arange(x.numel(), device=x.device)).to(dtype) for x in outputs)
    return [y.view(x.shape).to(x.dtype) for x, y in zip(outputs, made, strict=True)]


def forward_of(function: Function, inputs: Tensors) -> Callable[[], Outputs]:
    """A call without gradients of a function that takes inputs by name."""

    def call() -> Outputs:
        with torch.no_grad():
            return outputs_of(function(**inputs))

    return call


def backward_of(function: Function, inputs: Tensors) -> Callable[[], Outputs]:
    """A call of the backward alone, behind a forward that the first call does: all gradients."""
    wanted = [x for x in inputs.values() if x.requires_grad]
    state: dict[str, Any] = {}

    def call() -> Outputs:
        if not state:
            state["outputs"] = outputs_of(function(**inputs))
            state["incoming"] = incoming(state["outputs"], inputs["x"].dtype)
        return torch.autograd.grad(state["outputs"], wanted, state["incoming"], retain_graph=True)

    return call


def _rows(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, requires_grad=True)


def _norm(rows: int, width: int, *, bias: bool = False, residual: bool = False) -> Tensors:
    found = {"x": _rows(rows, width), "weight": torch.randn(width, requires_grad=True)}
    found |= {"bias": torch.randn(width, requires_grad=True)} if bias else {}
    return found | ({"residual": _rows(rows, width)} if residual else {})


def _plain_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + residual
    return F.rms_norm(s, s.shape[-1:], weight, 1e-6), s


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@functools.lru_cache(maxsize=4)
def _angles(tokens: int, device: torch.device) -> tw.Rope:
    """Of so many tokens in a row, heads of 128."""
    return tw.Rope(*tw.rope_tables(HEAD_DIM, tokens, device=device), torch.arange(tokens, device=device))


def _heads(rows: int, width: int) -> Tensors:
    """Queries, and keys of a quarter of their heads."""
    heads = max(1, width // HEAD_DIM // 4)
    return {
        "x": torch.randn(rows, 4 * heads, HEAD_DIM, requires_grad=True),
        "k": torch.randn(rows, heads, HEAD_DIM, requires_grad=True),
    }


def _rotated(x: torch.Tensor, k: torch.Tensor, impl: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    return tw.rope(x, k, rope=_angles(len(x), x.device), impl=impl)


def _plain_rotated(x: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As models of transformers have it."""
    rope = _angles(len(x), x.device)
    cos, sin = (torch.cat((table, table), -1).to(x.dtype)[:, None] for table in (rope.cos, rope.sin))

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat((-second, first), -1) * sin

    return turned(x), turned(k)


NEIGHBOURS = {
    "rms_norm": Neighbour(
        "norm", _norm, tw.rms_norm, lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6), 2, 3
    ),
    "rms_norm, residual": Neighbour(
        "norm", lambda rows, width: _norm(rows, width, residual=True), tw.rms_norm, _plain_residual, 4, 4
    ),
    "layer_norm": Neighbour(
        "norm", lambda rows, width: _norm(rows, width, bias=True), tw.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias), 2, 3,
    ),
    "softmax": Neighbour(
        "softmax", lambda rows, width: {"x": _rows(rows, width)}, tw.softmax, lambda x: x.softmax(-1), 2, 3
    ),
    "swiglu": Neighbour(
        "glu", lambda rows, width: {"x": _rows(rows, 2 * width)}, lambda x, impl: tw.swiglu(x, impl=impl), _swiglu,
        1.5, 2.5,
    ),
    "rope": Neighbour("rope", _heads, _rotated, _plain_rotated, 2.5, 2.5),
    "cross_entropy": Neighbour(
        "cross_entropy",
        lambda rows, width: {"x": _rows(rows, width), "target": torch.randint(width, (rows,))},
        lambda x, target, impl: tw.cross_entropy(x, target, impl=impl), F.cross_entropy, 1, 2,
    ),
}  # fmt: skip
