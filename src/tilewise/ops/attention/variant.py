"""The device functions of one formula: emitted once for a structure, and handed to kernels as compile-time arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tilewise.formula.emit import Captured, Emitter, import_source
from tilewise.formula.expr import lit, sym
from tilewise.formula.grad import UPSTREAM, gradients
from tilewise.formula.structure import parse
from tilewise.formula.walk import postorder
from tilewise.schedule.rule import tile_rule

_POSITIONS = ("b", "h", "i", "j")


@dataclass(frozen=True)
class MaskFunctions:
    """Device functions of a mask: visible(b, h, i, j), and how tiles are found: `keys` and `queries` give loop bounds for a tile of
    queries or keys (None: tile lists are needed, which `classify` makes)."""

    visible: Any
    keys: Any
    queries: Any
    classify: Any
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class ScoreFunctions:
    """Device functions of a score: apply(s, ...), its derivative slope(g, s, ...), and
    accumulate(...), which adds the gradients of captured tensors (None where none is wanted)."""

    apply: Any
    slope: Any
    accumulate: Any


@functools.lru_cache(maxsize=1024)
def mask_functions(text: str, captured: tuple[Captured, ...], tables: tuple[Captured, ...]) -> MaskFunctions:
    """Emit and import the functions of a mask."""
    rule = tile_rule(text)
    emitter = Emitter(captured, tables)
    sources = [emitter.function("visible", _POSITIONS, [rule.structure.root])]
    if rule.keys is not None and rule.queries is not None:
        sources.append(emitter.function("keys", ("b", "h", "i0", "i1"), rule.keys))
        sources.append(emitter.function("queries", ("b", "h", "j0", "j1"), rule.queries))
    else:
        parameters = ("b", "h", "i0", "i1", "j0", "j1", "block_i", "block_j")
        sources.append(emitter.function("classify", parameters, [rule.sure, rule.maybe]))
    module = import_source(emitter.module(sources))
    found = [getattr(module, name, None) for name in ("visible", "keys", "queries", "classify")]
    return MaskFunctions(*found, rule.by_batch, rule.by_head)


@functools.lru_cache(maxsize=1024)
def score_functions(text: str, captured: tuple[Captured, ...], grad_captured: tuple[bool, ...], fast: bool) -> ScoreFunctions:
    """Emit and import the functions of a score; `fast` allows the hardware's approximate tanh."""
    structure = parse(text)
    emitter = Emitter(captured, fast=fast)
    symbol = next((node for node in postorder([structure.root]) if node.op == "sym" and node.value == "s"), None)
    loads = [load for load in structure.loads if load.kind == "float" and grad_captured and grad_captured[load.value]]
    adjoints = gradients(structure.root, [*([] if symbol is None else [symbol]), *loads])
    sources = [emitter.function("apply", ("s", *_POSITIONS), [structure.root])]
    slope = sym(UPSTREAM, "float") * lit(0.0) if symbol is None else adjoints[0]
    sources.append(emitter.function("slope", ("g", "s", *_POSITIONS), [slope]))
    if loads:
        parts = [
            (load, adjoint, _grad_position(captured, grad_captured, load.value))
            for load, adjoint in zip(loads, adjoints[len(adjoints) - len(loads) :], strict=True)
        ]
        sources.append(emitter.accumulate("accumulate", ("g", "s", *_POSITIONS), parts))
    module = import_source(emitter.module(sources))
    return ScoreFunctions(module.apply, module.slope, getattr(module, "accumulate", None))


def _grad_position(captured: tuple[Captured, ...], wanted: tuple[bool, ...], slot: int) -> int:
    """Where slot's accumulator stands in the `grads` tuple: pointer and all strides, for each wanted tensor in slot order."""
    return sum(1 + captured[other].rank for other in range(slot) if wanted[other])
