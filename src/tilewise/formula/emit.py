"""Source code from formulas: device functions for Triton or Gluon, which `source` imports.

Tensors arrive in a tuple `args` (each one's pointer, then its strides) and numbers in a tuple `nums`. Their values are
never part of the source; only a tensor's rank and whether its last stride is 1 are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.formula.expr import Expr
from tilewise.formula.reach import INT32, NARROW, Range, reaches, within
from tilewise.formula.structure import share
from tilewise.formula.walk import postorder, symbols


class Captured(NamedTuple):
    """What the source depends on of a captured tensor: its rank, and whether the last dimension is contiguous."""

    rank: int
    unit: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Captured:
        return Captured(tensor.ndim, tensor.ndim > 0 and tensor.stride(-1) == 1)

    @property
    def strides(self) -> int:
        """How many strides travel as arguments."""
        return self.rank - self.unit


def tensor_arguments(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The `args` tuple that emitted functions expect: each tensor, then its strides (without a last stride of 1)."""
    values: list[Any] = []
    for tensor in tensors:
        values.append(tensor)
        values.extend(encoded(stride) for stride in tensor.stride()[: Captured.of(tensor).strides])
    return tuple(values)


def number_arguments(numbers: Sequence[Any], kinds: Sequence[str]) -> tuple[Any, ...]:
    """The `nums` tuple that emitted functions expect."""
    return tuple(float(n) if kind == "float" else encoded(n) for n, kind in zip(numbers, kinds, strict=True))


def encoded(n: int) -> int:
    """An integer as it travels in a tuple: Triton compiles a variant of its own for 1 and for multiples of 16 there,
    which 4n + 2 never is. The emitted source decodes it."""
    return 4 * n + 2


_CALLS = {"min": "minimum", "max": "maximum", "abs": "abs", "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2"}
_CALLS |= {"sqrt": "sqrt", "sin": "sin", "cos": "cos", "floor": "floor"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|"}
_INFIX |= {"bitand": "&", "bitor": "|", "bitxor": "^"}
_INFIX |= {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}


class Emitter:
    """Writes device functions in one dialect ('triton' or 'gluon'); `fast` allows the hardware's approximate tanh."""

    def __init__(
        self,
        captured: Sequence[Captured],
        tables: Sequence[Captured] = (),
        dialect: str = "triton",
        fast: bool = False,
    ) -> None:
        self.dialect = dialect
        self.prefix = "tl" if dialect == "triton" else "gl"
        self.captured = [*captured, *tables]
        self.first_table = len(captured)
        self.fast = fast

    def function(self, name: str, parameters: Sequence[str], roots: Sequence[Expr], like: str = "") -> str:
        """`def name(*parameters, args, nums)` returning the roots, in the shape of the parameter `like` if given."""
        lines, names = self._body(share(*roots))
        if like and not any(like in symbols(root) for root in roots):
            names = [f"{name} + {self.prefix}.zeros_like({like})" for name in names]
        return self._definition(name, parameters, [*lines, f"return {', '.join(names)}"])

    def once(self, name: str, parameters: Sequence[str], hoisted: Sequence[Expr]) -> str:
        """`def name(*parameters, args, nums)` returning a tuple, never empty, of what a program computes once."""
        lines, names = self._body(share(*hoisted))
        return self._definition(name, parameters, [*lines, f"return ({', '.join(names) or parameters[0]},)"])

    def columns(self, name: str, position: str, hoisted: Sequence[Expr]) -> str:
        """`def name(b, h, position, start, layout, args, nums)` returning a tuple of what a tile's columns need once,
        each [1, N] in the tile's `layout`, or a number that all share (Gluon only). `position` [N] is spread over the
        threads; in the tile's layout many of them have the same column, and each would work it out for itself. The
        first is at `start`, a multiple of N wherever a formula divides positions (`variant.keys_are_divided`).
        """
        lines, names = self._body(share(*hoisted))
        moved = []
        for root, of_threads in zip(share(*hoisted), names, strict=True):
            result = f"gl.convert_layout({of_threads}, gl.SliceLayout(0, layout))[None, :]"
            if _shift(root) and root.args[0].op == "sym":
                result = f"start >> {_shift(root)} if {root.args[1].value} % {position}.shape[0] == 0 else {result}"
            moved.append(result)
        parameters = ("b", "h", position, "start", "layout: gl.constexpr")
        return self._definition(name, parameters, [*lines, f"return ({', '.join(moved)},)"])

    def accumulate(
        self,
        name: str,
        parameters: Sequence[str],
        roots: Sequence[Expr],
        parts: Sequence[tuple[Expr, int]],
        rows: str = "i",
    ) -> str:
        """`def name(*parameters, tile, grads, args, nums)` that adds the gradients of captured tensors.

        `parts` are (load, position in `grads` of the float32 accumulator's pointer, which its strides follow); `roots`
        hold for each of them its indices and its adjoint. Parts that share an address are summed inside the tile
        first: along i, j or both, where the index does not move with them. `tile` is any value of the tile's full
        shape, whose axis 0 is `rows`.
        """
        lines, names = self._body(share(*roots))
        at_name = 0
        for load, at in parts:
            *indices, value = names[at_name : at_name + len(load.args) + 1]
            at_name += len(load.args) + 1
            moves = set().union(*(symbols(index) for index in load.args)) if load.args else set()
            lines.append(f"total = {value} + {self.prefix}.zeros_like(tile)")
            summed = [(axis, s) for axis, s in ((1, "j" if rows == "i" else "i"), (0, rows)) if s not in moves]
            lines += [f"total = {self.prefix}.sum(total, {axis}, keep_dims=True)" for axis, _ in summed]
            offsets = [f"{self._wide(index)} * decoded(grads[{at + 1 + dim}])" for dim, index in enumerate(indices)]
            spread = f"{self.prefix}.zeros_like(total).to({self.prefix}.int32)"
            lines.append(f"offsets = {' + '.join([spread, *offsets])}")
            if summed and self.dialect == "gluon":
                # in a tile's layout a thread holds a sum many times over, and would add each of them
                lines += [f"{part} = gl.convert_layout({part}, {_SUMS[summed[0][0]]})" for part in ("total", "offsets")]
            lines.append(f'{self.prefix}.atomic_add(grads[{at}] + offsets, total, sem="relaxed")')
        return self._definition(name, (*parameters, "tile", "grads"), lines)

    def module(self, functions: Sequence[str]) -> str:
        """A whole module: imports, then one device function after another."""
        body = "\n\n".join(functions)
        helpers = ", ".join(h for h in _HELPERS if re.search(rf"\b{h}\(", body))
        header = _HEADER[self.dialect]
        if helpers:
            header += f"\n\nfrom tilewise.tiles.arithmetic import {helpers}"
        return f'"""Emitted by tilewise from a formula; safe to delete."""\n\n{header}\n\n\n{body}'

    @staticmethod
    def _definition(name: str, parameters: Sequence[str], lines: Sequence[str]) -> str:
        return f"@jit\ndef {name}({', '.join((*parameters, 'args', 'nums'))}):\n" + "".join(
            f"    {line}\n" for line in lines
        )

    def _body(self, roots: Sequence[Expr]) -> tuple[list[str], list[str]]:
        """Assignments for every node, and the names of the roots."""
        lines: list[str] = []
        names: dict[int, str] = {}
        reach = reaches(roots, NARROW)
        for node in postorder(roots):
            args = [names[id(arg)] for arg in node.args]
            if self._wants_64_bits(node, reach):
                args = [
                    self._wide(name) if arg.kind == "int" else name for arg, name in zip(node.args, args, strict=True)
                ]
            code, is_leaf = self._node(node, args)
            names[id(node)] = code if is_leaf else f"x{len(lines)}"
            if not is_leaf:
                lines.append(f"x{len(lines)} = {code}")
        return lines, [names[id(root)] for root in roots]

    def _node(self, node: Expr, args: list[str]) -> tuple[str, bool]:
        """(source, whether it is a leaf used in place)."""
        op = node.op
        if op == "sym":
            return str(node.value), True
        if op == "lit":
            return self._literal(node), True
        if op == "rising":
            return args[0], True
        if op == "num":
            return f"decoded(nums[{node.value}])" if node.kind == "int" else f"nums[{node.value}]", False
        if op in ("load", "table"):
            value = f"{self.prefix}.load({self._address(node, args)})"
            if node.kind == "int":
                return f"as_int({value})", False
            return value + {"float": f".to({self.prefix}.float32)", "bool": " != 0"}[node.kind], False
        if op == "div" and not symbols(node) & {"s", "g"}:
            return f"{self.prefix}.div_rn({', '.join(args)})", False  # exact: a mask may round the quotient down
        if op in ("min", "max") and node.kind == "float":
            return f"{self.prefix}.{_CALLS[op]}({', '.join(args)}, propagate_nan=tl.PropagateNan.ALL)", False
        if op in _INFIX:
            return f"{args[0]} {_INFIX[op]} {args[1]}", False
        if op in _CALLS:
            return f"{self.prefix}.{_CALLS[op]}({', '.join(args)})", False
        if op == "where":
            return f"{self.prefix}.where({', '.join(args)})", False
        if op in ("tanh", "sigmoid"):
            return f"{op}{'_fast' if self.fast else ''}({args[0]})", False
        if _shift(node):
            return f"{args[0]} >> {_shift(node)}", False  # which rounds down, too
        if op in ("floordiv", "mod") and node.kind == "float":
            return f"float_{op}({', '.join(args)})", False
        if op in ("shl", "shr"):
            return self._shifted(op, node.args[1], args), False
        if op in ("floordiv", "mod", "to_float", "to_int"):
            return f"{op}({', '.join(args)})", False
        source = {"neg": f"-{args[0]}", "not": f"{args[0]} == 0", "to_bool": f"{args[0]} != 0"}[op]
        return source, False

    @staticmethod
    def _shifted(op: str, by: Expr, args: list[str]) -> str:
        if by.op == "lit" and 0 <= by.value < 64:
            return f"{args[0]} {'<<' if op == 'shl' else '>>'} {by.value}"
        number = f"{args[1]} * 0 + {args[0]}" if args[0].startswith("(") else args[0]  # a literal has no width
        return f"shift_{'left' if op == 'shl' else 'right'}({number}, {args[1]})"

    @staticmethod
    def _wants_64_bits(node: Expr, reach: dict[int, Range]) -> bool:
        """Whether an operation on integers may leave 32 bits, or meets a number that has."""
        if node.op in ("load", "table"):
            return False  # `_address` widens
        if any(arg.op == "lit" and arg.kind == "int" and not within((arg.value,) * 2, INT32) for arg in node.args):
            return True
        if node.op in ("shl", "shr"):
            by = node.args[1]
            return node.op == "shl" or by.op != "lit" or not 0 <= by.value < 32
        return node.kind == "int" and len(node.args) > 0 and (node.op == "mul" or not within(reach[id(node)], INT32))

    @staticmethod
    def _literal(node: Expr) -> str:
        if node.kind == "bool":
            return "(0 == 0)" if node.value else "(0 == 1)"
        return f"({node.value!r})" if node.kind == "int" else f"({float(node.value)!r})"

    @staticmethod
    def _wide(name: str) -> str:
        return name if name.startswith("(") else f"wide({name})"

    def _address(self, node: Expr, indices: list[str]) -> str:
        slot = node.value + (self.first_table if node.op == "table" else 0)
        at = sum(1 + c.strides for c in self.captured[:slot])
        scaled = indices[: self.captured[slot].strides]
        offsets = [
            f"{self._wide(index)} * decoded(args[{at + 1 + dim}])" for dim, index in enumerate(scaled) if index != "(0)"
        ]
        if self.captured[slot].unit:
            offsets.append(indices[-1])
        return f"args[{at}]{''.join(' + ' + offset for offset in offsets)}"


# spread over the threads of a warpgroup: one column of sums, or one row of them
_SUMS = {1: "gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])", 0: "gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])"}
_HEADER = {
    "triton": "import triton.language as tl\nfrom triton import jit",
    "gluon": (
        "import triton.language as tl\nfrom triton.experimental.gluon import jit\n"
        "from triton.experimental.gluon import language as gl"
    ),
}
_HELPERS = (
    "as_int",
    "decoded",
    "float_floordiv",
    "float_mod",
    "floordiv",
    "mod",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sigmoid_fast",
    "tanh",
    "tanh_fast",
    "to_float",
    "to_int",
    "wide",
)


def _shift(node: Expr) -> int:
    """By how many bits an integer is shifted where it is divided by a power of two that is known; else 0."""
    by = node.args[1].value if node.op == "floordiv" and node.kind == "int" and node.args[1].op == "lit" else 0
    return by.bit_length() - 1 if by > 0 and by & (by - 1) == 0 else 0
