"""Source code from formulas: device functions for Triton or Gluon, written to a cache folder and imported.

Tensors and numbers arrive in one tuple, in the order of `argument_values`: for each tensor slot its pointer and its strides, then
the numbers. Their values are never part of the source.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tilewise.formula.expr import Expr, postorder
from tilewise.formula.structure import share

EMITTER_VERSION = 1


@dataclass(frozen=True)
class Function:
    """One device function to emit: parameters in call order, and the expressions it returns."""

    name: str
    parameters: tuple[str, ...]
    roots: tuple[Expr, ...]


def argument_values(tensors: Sequence[torch.Tensor], numbers: Sequence[Any], kinds: Sequence[str]) -> tuple[Any, ...]:
    """The run-time tuple that an emitted function expects."""
    values: list[Any] = []
    for tensor in tensors:
        values.append(tensor)
        values.extend(tensor.stride())
    values.extend(float(n) if kind == "float" else n for n, kind in zip(numbers, kinds, strict=True))
    return tuple(values)


def argument_layout(ranks: Sequence[int]) -> tuple[list[int], int]:
    """Position of each tensor's pointer in the tuple, and of the first number."""
    positions, at = [], 0
    for rank in ranks:
        positions.append(at)
        at += 1 + rank
    return positions, at


_CALLS = {"min": "minimum", "max": "maximum", "abs": "abs", "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2"}
_CALLS |= {"sqrt": "sqrt", "sin": "sin", "cos": "cos", "floor": "floor"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|"}


class Emitter:
    """Writes the body of device functions in one dialect ('triton' or 'gluon')."""

    def __init__(self, ranks: Sequence[int], dialect: str = "triton", table_ranks: Sequence[int] = (), fast: bool = False) -> None:
        self.prefix = "tl" if dialect == "triton" else "gl"
        self.ranks = list(ranks)
        self.table_ranks = list(table_ranks)
        self.fast = fast

    def function(self, spec: Function) -> str:
        roots = share(*spec.roots)
        lines, names = [], {}
        for node in postorder(roots):
            name, code = self._node(node, [names[id(arg)] for arg in node.args], len(lines))
            if code is not None:
                lines.append(f"    {name} = {code}")
            names[id(node)] = name
        results = ", ".join(names[id(root)] for root in roots)
        head = f"@jit\ndef {spec.name}({', '.join((*spec.parameters, 'args'))}):\n"
        return head + "\n".join(lines) + ("\n" if lines else "") + f"    return {results}\n"

    def _node(self, node: Expr, args: list[str], index: int) -> tuple[str, str | None]:
        name = f"x{index}"
        op = node.op
        if op == "sym":
            return str(node.value), None
        if op == "lit":
            return self._literal(node), None
        if op == "num":
            at = argument_layout(self.ranks)[1] + node.value + sum(1 + rank for rank in self.table_ranks)
            return name, f"args[{at}]"
        if op in ("load", "table"):
            return name, self._load(node, args)
        if op in _INFIX:
            if op == "mul" and node.kind == "int":  # products of positions may pass 2**31
                return name, f"wide({args[0]}) * wide({args[1]})"
            return name, f"{args[0]} {_INFIX[op]} {args[1]}"
        if op in _CALLS:
            return name, f"{self.prefix}.{_CALLS[op]}({', '.join(args)})"
        if op in ("floordiv", "mod"):
            return name, f"{op}({args[0]}, {args[1]})"
        if op == "neg":
            return name, f"-{args[0]}"
        if op == "not":
            return name, f"{args[0]} == 0"
        if op == "where":
            return name, f"{self.prefix}.where({', '.join(args)})"
        if op in ("tanh", "sigmoid"):
            return name, f"{op}_fast({args[0]})" if self.fast else f"{op}({args[0]})"
        if op == "to_float":
            return name, f"to_float({args[0]})"
        if op == "to_int":
            return name, f"to_int({args[0]})"
        if op == "to_bool":
            return name, f"{args[0]} != 0"
        raise AssertionError(f"no source for {op}")

    @staticmethod
    def _literal(node: Expr) -> str:
        if node.kind == "bool":
            return "(0 == 0)" if node.value else "(0 == 1)"
        return f"({node.value!r})" if node.kind == "int" else f"({float(node.value)!r})"

    def _load(self, node: Expr, indices: list[str]) -> str:
        if node.op == "load":
            at = argument_layout(self.ranks)[0][node.value]
        else:
            at = argument_layout([*self.ranks, *self.table_ranks])[0][len(self.ranks) + node.value]
        offsets = [f"wide({index}) * args[{at + 1 + dim}]" for dim, index in enumerate(indices)]
        value = f"{self.prefix}.load(args[{at}]{''.join(' + ' + o for o in offsets)})"
        if node.kind == "float":
            return f"{value}.to({self.prefix}.float32)"
        return f"{value} != 0" if node.kind == "bool" else value


_HEADER = {
    "triton": "import triton.language as tl\nfrom triton import jit\n\nfrom tilewise.tiles.arithmetic import ",
    "gluon": (
        "from triton.experimental.gluon import jit\nfrom triton.experimental.gluon import language as gl\n\n"
        "from tilewise.tiles.gluon_arithmetic import "
    ),
}
_HELPERS = ("floordiv", "mod", "sigmoid", "sigmoid_fast", "tanh", "tanh_fast", "to_float", "to_int", "wide")


def module_source(functions: Sequence[Function], emitter: Emitter) -> str:
    """A whole module: imports, then one device function after another."""
    bodies = "\n\n".join(emitter.function(f) for f in functions)
    used = [h for h in _HELPERS if f" {h}(" in bodies or f"({h}(" in bodies]
    dialect = "triton" if emitter.prefix == "tl" else "gluon"
    header = _HEADER[dialect] + ", ".join(used) if used else _HEADER[dialect].rsplit("\n\nfrom tilewise", 1)[0]
    return f'"""Emitted by tilewise from a formula; safe to delete."""\n\n{header}\n\n\n{bodies}'


def cache_folder() -> pathlib.Path:
    """Where emitted modules live: `$TILEWISE_CACHE`, else `~/.cache/tilewise`."""
    root = os.environ.get("TILEWISE_CACHE") or pathlib.Path.home() / ".cache" / "tilewise"
    folder = pathlib.Path(root) / f"emitted-{EMITTER_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def import_source(source: str) -> ModuleType:
    """Write the source under its hash, atomically, and import it (Triton reads functions back from their file)."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:24]
    name = f"tilewise_emitted_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    path = cache_folder() / f"{name}.py"
    if not path.exists() or path.read_text() != source:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as handle:
            handle.write(source)
        os.replace(handle.name, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
