"""What stands beside attention in a model, beside PyTorch's own: inputs, both ways to compute it, and the fewest bytes.

The fewest bytes are every input read and every result written once, counted in tensors as large as x: what a kernel
moves that is one pass. `tilewise bench neighbours` and the benchmark of the same name hold their times against them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise.explain.operators import Moved, moved

HEAD_DIM = 128

Tensors = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Subject:
    """An operation: ours, and the same in PyTorch; `forward` and `backward` count tensors as large as x that are read
    or written at least. `make(rows, width)` gives float32 inputs by name, x first.
    """

    operation: str  # its folder
    make: Callable[[int, int], Tensors]
    ours: Function
    plain: Function
    forward: float
    backward: float

    def fewest(self, inputs: Tensors) -> tuple[int, int]:
        """Bytes of one pass forward, and of one backward."""
        x = inputs["x"]
        return int(self.forward * x.nbytes), int(self.backward * x.nbytes)


# inputs and results --------------------------------------------------------------------------------------------------


def placed(inputs: Tensors, device: torch.device | str, dtype: torch.dtype) -> Tensors:
    """The inputs there, leaves of an autograd graph where they are floats."""
    return {
        name: x.detach().to(device, dtype).requires_grad_() if x.is_floating_point() else x.to(device)
        for name, x in inputs.items()
    }


def outputs_of(found: Any) -> Outputs:
    """What a function returned, as a tuple."""
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def incoming(outputs: Outputs, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of the outputs, alike for everybody, of numbers that `dtype` holds."""
    made = (torch.cos(torch.arange(x.numel(), device=x.device)).to(dtype) for x in outputs)
    return [y.view(x.shape).to(x.dtype) for x, y in zip(outputs, made, strict=True)]


def in_operators(subject: Subject, rows: int, width: int, dtype: torch.dtype) -> tuple[Moved, Moved]:
    """The bytes that PyTorch's version of a layer moves, operator by operator, without computing anything.

    Args:
        subject: a layer, as in SUBJECTS.
        rows, width: shape of its input.
        dtype: of its tensors.

    Returns:
        (forward, backward), each a `Moved` of `tilewise.explain.operators`.

    Example:
        >>> from tilewise.explain.neighbours import SUBJECTS, in_operators
        >>> forward, backward = in_operators(SUBJECTS["swiglu"], 1024, 4096, torch.bfloat16)
        >>> forward.bytes / (1024 * 2 * 4096 * 2)  # in units of the input
        2.5
    """
    with torch.device("meta"):
        inputs = placed(subject.make(rows, width), "meta", dtype)
        subject.plain(*inputs.values())  # tables are there from now on
        state: list[Outputs] = []
        forward = moved(lambda: state.append(outputs_of(subject.plain(*inputs.values()))))
        do = [torch.empty_like(x) for x in state[0]]
        wanted = [x for x in inputs.values() if x.requires_grad]
        return forward, moved(lambda: torch.autograd.grad(state[0], wanted, do))


# operations ----------------------------------------------------------------------------------------------------------


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
    return {
        "x": torch.randn(rows, width // HEAD_DIM, HEAD_DIM, requires_grad=True),
        "k": torch.randn(rows, width // HEAD_DIM // 4, HEAD_DIM, requires_grad=True),
    }


def _rotated(x: torch.Tensor, k: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tw.rope(x, k, rope=_angles(len(x), x.device), impl=impl)


def _plain_rotated(x: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As models of transformers have it."""
    rope = _angles(len(x), x.device)
    cos, sin = (torch.cat((table, table), -1).to(x.dtype)[:, None] for table in (rope.cos, rope.sin))

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat((-second, first), -1) * sin

    return turned(x), turned(k)


SUBJECTS = {
    "rms_norm": Subject(
        "norm", _norm, tw.rms_norm, lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6), 2, 3
    ),
    "rms_norm, residual": Subject(
        "norm", lambda rows, width: _norm(rows, width, residual=True), tw.rms_norm, _plain_residual, 4, 4
    ),
    "layer_norm": Subject(
        "norm", lambda rows, width: _norm(rows, width, bias=True), tw.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias), 2, 3,
    ),
    "softmax": Subject(
        "softmax", lambda rows, width: {"x": _rows(rows, width)}, tw.softmax, lambda x: x.softmax(-1), 2, 3
    ),
    "swiglu": Subject(
        "glu", lambda rows, width: {"x": _rows(rows, 2 * width)}, lambda x, impl: tw.swiglu(x, impl=impl), _swiglu,
        1.5, 2.5,
    ),
    "rope": Subject("rope", _heads, _rotated, _plain_rotated, 2.5, 2.5),
}  # fmt: skip
LOSS = Subject(
    "cross_entropy",
    lambda rows, width: {"x": _rows(rows, width), "target": torch.randint(width, (rows,))},
    lambda x, target, impl: tw.cross_entropy(x, target, impl=impl),
    F.cross_entropy,
    1,
    2,
)


def linear_inputs(tokens: int, hidden: int, classes: int) -> Tensors:
    """Of a last linear layer with its loss: x, weight and target."""
    weight = torch.randn(classes, hidden) / hidden**0.5
    return {"x": torch.randn(tokens, hidden), "weight": weight, "target": torch.randint(classes, (tokens,))}


def plain_linear_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`tilewise.linear_cross_entropy` in PyTorch."""
    return F.cross_entropy(F.linear(x, weight), target)
