"""Hypothesis strategies: shapes of attention, and random formulas that run on symbols and on tensors alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tilewise.testing import cases
from tilewise.testing.case import Case

SIZE = 11  # extent of every captured tensor of a random formula; indices are clamped to it


@st.composite
def shapes(draw: st.DrawFn) -> Case:
    """Small cases of any shape, with one of a few masks and scores."""
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    length = st.one_of(st.integers(1, 20), st.sampled_from([127, 128, 129, 150]))
    seqlen_q = draw(length)
    return Case(
        "drawn",
        batch=draw(st.integers(1, 3)),
        seqlen_q=seqlen_q,
        seqlen_k=draw(st.one_of(length, st.just(seqlen_q))),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=draw(st.sampled_from([1, 3, 8, 16, 40])),
        head_dim_v=draw(st.sampled_from([1, 5, 16, 24])),
        mask=draw(st.sampled_from([None, cases.causal, cases.window(7), cases.window(3, 9), cases.by_head])),
        score=draw(st.sampled_from([None, cases.softcap, cases.alibi, cases.temperature])),
        sink=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.2])),
        lse_gradient=draw(st.booleans()),
    )


# random formulas ---------------------------------------------------------------------------------------------------
# A formula is a nested tuple (operation, operands...); `evaluate_tree` runs it on whatever the symbols are. The left
# operand of every operation depends on a symbol, so that PyTorch and the formula promote types alike.

Tree = tuple[Any, ...]


def _int_trees() -> st.SearchStrategy[Tree]:
    leaf = st.sampled_from([("i",), ("j",), ("i",), ("j",), ("b",), ("h",)])
    number = st.integers(-4, 40).map(lambda n: ("number", n))

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        right = st.one_of(inner, number)
        return st.one_of(
            st.tuples(st.sampled_from(["add", "sub", "sub"]), inner, right),
            st.tuples(st.just("mul"), inner, st.integers(-3, 3).map(lambda n: ("number", n))),
            st.tuples(
                st.sampled_from(["floordiv", "mod"]),
                inner,
                st.sampled_from([-5, 2, 3, 7, 16]).map(lambda n: ("number", n)),
            ),
            st.tuples(st.sampled_from(["abs", "neg", "not"]), inner),
            st.tuples(st.sampled_from(["and", "or", "xor"]), inner, right),
            st.tuples(st.sampled_from(["shift_left", "shift_right"]), inner, st.integers(0, 3).map(_number)),
            st.tuples(st.sampled_from(["minimum", "maximum"]), inner, inner),
            st.tuples(st.just("clamp"), inner, st.integers(-3, 4), st.integers(5, 30)),
            st.tuples(st.just("load_int"), inner),
        )

    return st.recursive(leaf, grow, max_leaves=5)


def _number(n: int) -> Tree:
    return ("number", n)


def far_trees() -> st.SearchStrategy[Tree]:
    """Trees of masks that compare integers which leave 64 bits, and wrap."""
    leaf = st.sampled_from([("i",), ("j",), ("j",), ("h",)])
    far = st.one_of(st.integers(-(2**61), 2**61 - 1), st.sampled_from([2**60, 2**58, 2**31, -(2**60), 3])).map(_number)
    near = st.integers(-3, 70).map(_number)

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        some = st.sampled_from([-(2**40), -7, -1, 2, 3, 2**55]).map(_number)
        return st.one_of(
            st.tuples(st.sampled_from(["add", "sub", "mul", "mul", "and", "or", "xor"]), inner, st.one_of(inner, far)),
            st.tuples(st.sampled_from(["shift_left", "shift_right"]), inner, st.one_of(inner, near)),
            st.tuples(st.sampled_from(["floordiv", "mod"]), inner, some),
            st.tuples(st.sampled_from(["abs", "neg", "not"]), inner),
            st.tuples(st.sampled_from(["minimum", "maximum"]), inner, inner),
            st.tuples(st.just("load_far"), inner),
            st.tuples(st.just("truncated"), inner),
        )

    ints = st.recursive(leaf, grow, max_leaves=6)
    return st.tuples(st.sampled_from(["lt", "le", "eq", "ne"]), ints, st.one_of(ints, far))


def bool_trees(max_leaves: int = 5) -> st.SearchStrategy[Tree]:
    """Trees of masks."""
    ints = _int_trees()
    floats = _float_trees(with_score=False)
    compare = st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])
    leaf = st.one_of(
        st.tuples(compare, ints, st.one_of(ints, st.integers(-4, 40).map(lambda n: ("number", n)))),
        st.tuples(st.sampled_from(["lt", "ge"]), floats, floats),
        st.tuples(st.just("load_bool"), ints, ints),
        st.tuples(st.just("to_bool"), ints),
    )

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        return st.one_of(
            st.tuples(st.sampled_from(["and", "or", "xor"]), inner, inner),
            st.tuples(st.just("not"), inner),
            st.tuples(st.just("where"), inner, inner, inner),
        )

    return st.recursive(leaf, grow, max_leaves=max_leaves)


def _float_trees(with_score: bool) -> st.SearchStrategy[Tree]:
    ints = _int_trees()
    condition = st.tuples(st.sampled_from(["lt", "ge", "eq"]), ints, ints)
    leaf = st.one_of(
        st.tuples(st.just("to_float"), ints),
        st.tuples(st.just("load_float"), ints),
        st.tuples(st.just("load_plane"), ints, ints),
        *([st.just(("s",))] * 3 if with_score else []),
    )
    number = st.sampled_from([-2.0, -0.5, 0.25, 1.5, 3.0, 7.0, 41.0]).map(lambda x: ("number", x))
    undefined = [] if with_score else ["sqrt", "log"]  # NaN hides a pair; a score's would spread
    tame = ["positive_log", "positive_log2", "positive_sqrt", "inverse"]

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        return st.one_of(
            st.tuples(st.sampled_from(["add", "sub", "mul"]), inner, st.one_of(inner, number)),
            st.tuples(st.just("div"), inner, number),
            st.tuples(
                st.sampled_from(["tanh", "sigmoid", "sin", "cos", "abs", "neg", "bounded_exp", "bounded_exp2"]), inner
            ),
            st.tuples(st.sampled_from([*tame, *undefined]), inner),
            st.tuples(st.sampled_from(["minimum", "maximum"]), inner, inner),
            st.tuples(st.just("where"), condition, inner, inner),
            st.tuples(st.just("floor"), inner),
            st.tuples(st.just("square"), inner),
        )

    return st.recursive(leaf, grow, max_leaves=5)


def float_trees() -> st.SearchStrategy[Tree]:
    """Trees of scores, in s and the positions."""
    return _float_trees(with_score=True)


def captured_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """What the trees index: `int`, `far` and `float` (SIZE,), `bool` and `plane` (SIZE, SIZE)."""
    generator = torch.Generator().manual_seed(seed)
    ends = [-(2**63), 2**63 - 1, -(2**62), 2**62, 2**31, -(2**31), -1, 0, 1, 5, 2**63 - 5]
    return {
        "far": torch.tensor(ends),
        "int": torch.randint(-3, 30, (SIZE,), generator=generator),
        "float": torch.randn(SIZE, generator=generator, dtype=torch.float64),
        "bool": torch.rand(SIZE, SIZE, generator=generator) < 0.5,
        "plane": torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64),
    }


_DIRECT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "neg": lambda a: -a,
    "abs": abs,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "clamp": lambda a, low, high: torch.clamp(a, low, high),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shift_left": lambda a, b: a << b,
    "shift_right": lambda a, b: a >> b,
    "truncated": lambda a: (a.to(torch.float64) * 1.5).to(torch.int64),
    "where": torch.where,
    "to_bool": lambda a: a.to(torch.bool),
    "to_float": lambda a: a.to(torch.float64) * 0.1,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "bounded_exp": lambda a: torch.exp(torch.tanh(a)),
    "bounded_exp2": lambda a: torch.exp2(torch.sin(a)),
    "positive_log": lambda a: torch.log(a * a + 0.5),
    "positive_log2": lambda a: torch.log2(abs(a) + 0.5),
    "positive_sqrt": lambda a: torch.sqrt(a * a + 0.5),
    "sqrt": torch.sqrt,
    "log": torch.log,
    "inverse": lambda a: 1.0 / (a * a + 0.5),
    "square": torch.square,
    "floor": lambda a: torch.floor(a) + a % 0.75,
}
_LOADS = {"load_int": "int", "load_far": "far", "load_float": "float", "load_bool": "bool", "load_plane": "plane"}


def evaluate_tree(tree: Tree, symbols: dict[str, Any], captured: dict[str, torch.Tensor]) -> Any:
    """Run a tree on symbols of a formula or on tensors."""
    name, *operands = tree
    if name == "number":
        return operands[0]
    if name in symbols:
        return symbols[name]
    if name == "clamp":
        return _DIRECT[name](evaluate_tree(operands[0], symbols, captured), *operands[1:])
    values = [evaluate_tree(operand, symbols, captured) for operand in operands]
    if name in _LOADS:
        index = tuple(torch.clamp(value, 0, SIZE - 1) for value in values)
        return captured[_LOADS[name]][index if len(index) > 1 else index[0]]
    return _DIRECT[name](*values)


def as_mask_function(tree: Tree, captured: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """mask(b, h, i, j) of a tree."""
    return lambda b, h, i, j: evaluate_tree(tree, {"b": b, "h": h, "i": i, "j": j}, captured)


def as_score_function(tree: Tree, captured: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """score(s, b, h, i, j) of a tree."""
    return lambda s, b, h, i, j: evaluate_tree(tree, {"s": s, "b": b, "h": h, "i": i, "j": j}, captured)
