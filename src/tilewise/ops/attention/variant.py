"""The device functions of one formula: emitted once for a structure, and handed to kernels as compile-time
arguments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tilewise.formula.emit import Captured, Emitter
from tilewise.formula.expr import Expr, lit, sym
from tilewise.formula.grad import UPSTREAM, gradients
from tilewise.formula.linear import linear
from tilewise.formula.optimize import base_2, cheaper, hoist, written_once
from tilewise.formula.source import import_source
from tilewise.formula.structure import parse
from tilewise.formula.walk import postorder, symbols
from tilewise.schedule.rule import tile_rule

CAUSAL = "(le j i)"  # the structure of `causal`
_POSITIONS = ("b", "h", "i", "j")


@dataclass(frozen=True)
class Side:
    """Device functions for kernels whose programs own the positions of one axis.

    `tiles(b, h, first, last)` gives the visible run of the other axis for a tile (None where tile lists are used), and
    `rows(b, h, x)` for each row (None where what it sees need not be one run). `once(b, h, x)` gives what a program
    computes once, which `visible(b, h, i, j, once)` reads; in Gluon `columns(b, h, x, start, layout)` adds to that what
    the other axis's positions of a tile need (None where that is little).
    """

    tiles: Any
    rows: Any
    once: Any
    columns: Any
    visible: Any


@dataclass(frozen=True)
class MaskFunctions:
    """Device functions of a mask: for programs that own queries, for those that own keys, and `classify` for making
    tile lists (None where loop bounds replace them)."""

    queries: Side
    keys: Side
    classify: Any
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class ScoreSide:
    """apply(s, b, h, i, j, once), its derivative slope(g, s, b, h, i, j, once), and accumulate(...), which adds the
    gradients of captured tensors (None where none is wanted); `once(b, h, x)` gives what a program computes once, and
    `columns` as in `Side`."""

    once: Any
    columns: Any
    apply: Any
    slope: Any
    accumulate: Any


@dataclass(frozen=True)
class ScoreFunctions:
    """Device functions of a score, for programs that own queries and for those that own keys. In Gluon, those of
    `forward` take scores that are not scaled yet, the scale behind the formula's numbers, and give them `in_base_2` or
    not; `linear(b, h)` gives the parts of a score that adds something linear in the positions (None for others).
    """

    queries: ScoreSide
    keys: ScoreSide
    forward: ScoreSide
    in_base_2: bool
    linear: Any


@functools.lru_cache(maxsize=1024)
def mask_functions(
    text: str, captured: tuple[Captured, ...], tables: tuple[Captured, ...], dialect: str = "triton"
) -> MaskFunctions:
    """Emit and import the functions of a mask, in the dialect of `formula.emit`."""
    rule = tile_rule(text)
    emitter = Emitter(captured, tables, dialect)
    sources = []
    for axis in ("i", "j"):
        if rule.spans is not None:
            sources.append(emitter.function(f"tiles_{axis}", ("b", "h", f"{axis}0", f"{axis}1"), rule.spans[axis]))
        if axis in rule.rows:
            sources.append(emitter.function(f"rows_{axis}", ("b", "h", axis), rule.rows[axis]))
        else:
            (visible,), hoisting = _hoisted(emitter, [cheaper(written_once(rule.structure.root))], axis)
            sources += hoisting
            sources.append(emitter.function(f"visible_{axis}", (*_POSITIONS, "once"), [visible]))
    if rule.spans is None:
        parameters = ("b", "h", "i0", "i1", "j0", "j1", "block_i", "block_j")
        sources.append(emitter.function("classify", parameters, [rule.sure, rule.maybe]))
    module = import_source(emitter.module(sources))

    def side(axis: str) -> Side:
        names = ("tiles", "rows", "once", "columns", "visible")
        return Side(*(getattr(module, f"{name}_{axis}", None) for name in names))

    return MaskFunctions(side("i"), side("j"), getattr(module, "classify", None), rule.by_batch, rule.by_head)


@functools.lru_cache(maxsize=1024)
def score_functions(
    text: str,
    captured: tuple[Captured, ...],
    grad_captured: tuple[bool, ...],
    fast: bool,
    dialect: str = "triton",
    mask: str | None = None,
) -> ScoreFunctions:
    """Emit and import the functions of a score; `fast` allows the hardware's approximate tanh. `mask` says which pairs
    matter (for `linear`).
    """
    structure = parse(text)
    emitter = Emitter(captured, (), dialect, fast)
    symbol = next((node for node in postorder([structure.root]) if node.op == "sym" and node.value == "s"), None)
    loads = [load for load in structure.loads if load.kind == "float" and grad_captured and grad_captured[load.value]]
    adjoints = gradients(structure.root, [*([] if symbol is None else [symbol]), *loads])
    slope = sym(UPSTREAM, "float") * lit(0.0) if symbol is None else adjoints[0]
    of_loads = adjoints[len(adjoints) - len(loads) :]
    grad_roots = [root for load, adjoint in zip(loads, of_loads, strict=True) for root in (*load.args, adjoint)]
    parts = [(load, _grad_position(captured, grad_captured, load.value)) for load in loads]
    sources = []
    for axis in ("i", "j"):
        # the portable kernels take them beside dQ, those of Gluon beside dK and dV
        wanted = [structure.root, slope, *(grad_roots if (axis == "i") == (dialect == "triton") else [])]
        (applied, sloped, *grads), hoisting = _hoisted(emitter, [cheaper(root) for root in wanted], axis)
        sources += hoisting
        sources.append(emitter.function(f"apply_{axis}", ("s", *_POSITIONS, "once"), [applied], "s"))
        sources.append(emitter.function(f"slope_{axis}", ("g", "s", *_POSITIONS, "once"), [sloped], "s"))
        if grads:
            parameters = ("g", "s", *_POSITIONS, "once")
            sources.append(emitter.accumulate(f"accumulate_{axis}", parameters, grads, parts, axis))
    in_base_2 = False
    if dialect == "gluon":
        root, in_base_2 = base_2(structure.root, Expr("num", (), "float", len(structure.number_kinds)))
        rest, hoisting = _hoisted(emitter, [root], "i", "forward")
        sources += [*hoisting, emitter.function("apply_forward", ("s", *_POSITIONS, "once"), rest, "s")]
        found = linear(structure.root, None if mask is None else parse(mask).root)
        if found is not None:
            sources.append(emitter.function("linear", ("b", "h"), list(found)))
    module = import_source(emitter.module(sources))

    def side(of: str) -> ScoreSide:
        names = ("once", "columns", "apply", "slope", "accumulate")
        return ScoreSide(*(getattr(module, f"{name}_{of}", None) for name in names))

    return ScoreFunctions(side("i"), side("j"), side("forward"), in_base_2, getattr(module, "linear", None))


def _hoisted(emitter: Emitter, roots: list[Expr], axis: str, of: str = "") -> tuple[list[Expr], list[str]]:
    """What is left of expressions for programs that own `axis`, and the sources of `once` and `columns`, whose names
    end in `of`, or `axis`.
    """
    other = "j" if axis == "i" else "i"
    hoisted, rest = hoist(roots, axis)
    sources = [emitter.once(f"once_{of or axis}", ("b", "h", axis), hoisted)]
    if emitter.dialect == "gluon":
        columns, rest = hoist(rest, other, first=max(1, len(hoisted)), dear=True)
        if columns:
            sources.append(emitter.columns(f"columns_{of or axis}", other, columns))
    return rest, sources


@functools.lru_cache(maxsize=4096)
def formula_kind(mask: str | None, score: str | None) -> str:
    """What a formula asks of a kernel, for choosing its tiles.

    'curved': the score's derivative depends on the score (softcap), which costs registers; 'lists': tiles come from
    lists; 'band': both ends of the visible run move, so programs are short; 'additive': a score, but only with
    something added; else 'plain'.
    """
    if score is not None:
        root = parse(score).root
        symbol = next((node for node in postorder([root]) if node.op == "sym" and node.value == "s"), None)
        slope = gradients(root, [] if symbol is None else [symbol])
        if slope and slope[0].op != "sym":
            return "curved"
    if mask is not None and tile_rule(mask).spans is None:
        return "lists"
    if mask is not None and is_band(mask):
        return "band"
    return "plain" if score is None else "additive"


@functools.lru_cache(maxsize=4096)
def is_band(mask: str) -> bool:
    """Whether both ends of the visible run of keys move with the query, as a window's."""
    rule = tile_rule(mask)
    return rule.spans is not None and all(end.op != "lit" for end in rule.rows["i"])


@functools.lru_cache(maxsize=4096)
def keys_are_divided(mask: str, score: str | None) -> bool:
    """Whether kernels rely on tiles of keys that begin at multiples of their size: what a mask reads of keys is known
    by tiles, or keys are divided, by a tile's size perhaps.
    """
    if any("j" in table.dims for table in tile_rule(mask).tables):
        return True
    nodes = postorder([parse(text).root for text in (mask, score) if text is not None])
    return any(node.op in ("floordiv", "mod") and "j" in symbols(node) for node in nodes)


def _grad_position(captured: tuple[Captured, ...], wanted: tuple[bool, ...], slot: int) -> int:
    """Where slot's accumulator stands in the `grads` tuple: pointer and all strides, for each wanted tensor in slot
    order.
    """
    return sum(1 + captured[other].rank for other in range(slot) if wanted[other])
