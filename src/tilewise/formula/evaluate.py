"""Evaluate a formula with PyTorch: the reference, the CPU path and tile classification all go through here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.formula.expr import Expr
from tilewise.formula.walk import postorder


def _divide_floor(a: Any, b: Any) -> Any:
    return torch.floor_divide(a, b) if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a // b


_UNARY: dict[str, Callable[..., Any]] = {
    "neg": torch.neg,
    "rising": torch.clone,
    "not": torch.logical_not,
    "abs": torch.abs,
    "floor": torch.floor,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
}
_BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": _divide_floor,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "alike": torch.logical_and,
    "or": torch.logical_or,
}


def evaluate(
    roots: Sequence[Expr],
    symbols: dict[str, torch.Tensor],
    tensors: Sequence[torch.Tensor] = (),
    numbers: Sequence[Any] = (),
    dtype: torch.dtype = torch.float32,
    tables: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Values of `roots` for symbol tensors that broadcast against each other.

    Args:
        roots: expressions in slot form.
        symbols: integer tensors for `b h i j`, a float tensor for `s`; shapes must broadcast.
        tensors: captured tensors by slot, on the device of the symbols.
        numbers: run-time numbers by slot.
        dtype: type of every float value (float64 in the reference).
        tables: block extrema by slot, where `roots` are bounds (`formula.interval`).
    """
    device = next(iter(symbols.values())).device
    values: dict[int, torch.Tensor] = {}
    for node in postorder(roots):
        args = [values[id(arg)] for arg in node.args]
        values[id(node)] = _value(node, args, symbols, (tensors, tables), numbers, dtype, device)
    return [values[id(root)] for root in roots]


def _value(
    node: Expr,
    args: list[torch.Tensor],
    symbols: dict[str, torch.Tensor],
    sources: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    numbers: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    types = {"bool": torch.bool, "int": torch.int64, "float": dtype}
    if node.op == "sym":
        return symbols[node.value].to(types[node.kind])
    if node.op in ("num", "lit"):
        value = numbers[node.value] if node.op == "num" else node.value
        return torch.as_tensor(value, dtype=types[node.kind], device=device)
    if node.op in ("load", "table"):
        source = sources[node.op == "table"][node.value]
        picked: torch.Tensor = source[tuple(args)] if args else source
        return picked.to(types[node.kind])
    if node.op.startswith("to_"):
        if node.kind == "int" and args[0].is_floating_point():
            return args[0].trunc().to(torch.int64)
        return args[0].to(types[node.kind])
    if node.op == "where":
        return torch.where(args[0], args[1], args[2])
    result: torch.Tensor = _UNARY[node.op](args[0]) if len(args) == 1 else _BINARY[node.op](args[0], args[1])
    return result
