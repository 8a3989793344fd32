"""What a function is told that cannot be traced."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.formula.test_trace import ONE, ORDER, PLANE, SLOPES, THREE
from tilewise.core.errors import FormulaError
from tilewise.formula.emit import Emitter
from tilewise.formula.grad import gradients
from tilewise.formula.limits import largest_size
from tilewise.formula.linear import linear
from tilewise.formula.optimize import base_2, cheaper
from tilewise.schedule.rule import tile_rule

WIDE = torch.zeros(2, 1000)

torch.library.define("tilewise_test::tanh", "(Tensor x) -> Tensor")  # a user's own operator, for what messages call it


def branching(b: Any, h: Any, i: Any, j: Any) -> Any:
    if i > j:  # the line that the message names
        return j > 2
    return j > 3


BRANCH_LINE = branching.__code__.co_firstlineno + 1


def test_a_data_dependent_branch_names_its_line() -> None:
    with pytest.raises(FormulaError) as caught:
        tw.mask(branching)
    message = str(caught.value)
    assert f"{__file__}:{BRANCH_LINE}" in message
    assert "where" in message
    assert "(j < i)" in message


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "and": (lambda b, h, i, j: i >= j and j > 2, "bool()"),
    "math": (lambda b, h, i, j: math.floor(i) > j, "float()"),
    "int": (lambda b, h, i, j: int(i) > 2, "int()"),
    "range": (lambda b, h, i, j: range(i), "index()"),
    "list_index": (lambda b, h, i, j: [1, 2, 3][i] > 0, "index()"),
    "iteration": (lambda b, h, i, j: sum(x for x in i) > 0, "iteration"),
    "len": (lambda b, h, i, j: len(i) > 0, "len()"),
    "unsupported_torch": (lambda b, h, i, j: torch.cumsum(i, 0) > j, "torch.cumsum"),
    "whole_tensor": (lambda b, h, i, j: i < PLANE, "without an index"),
    "too_few_indices": (lambda b, h, i, j: PLANE[i] > 0, "11 values"),
    "too_many_indices": (lambda b, h, i, j: ORDER[i, j] > 0, "2 indices"),
    "five_dimensions": (lambda b, h, i, j: torch.zeros(2, 2, 2, 2, 2)[b, b, b, b, i] > 0, "5 indices"),
    "float_index": (lambda b, h, i, j: ORDER[i / 2] > 0, "float expression"),
    "bool_index": (lambda b, h, i, j: ORDER[i > j] > 0, "bool expression"),
    "slice": (lambda b, h, i, j: PLANE[:, i] > 0, "slice"),
    "slice_of_positions": (lambda b, h, i, j: PLANE[i, :j].any(), "slice"),
    "a_row": (lambda b, h, i, j: PLANE[i, :] > 0, "11 values, of bool"),
    "rows_of_other_sizes": (lambda b, h, i, j: (PLANE[i] > SLOPES[:2]).any(-1), "2 and 11 entries"),
    "a_wide_row": (lambda b, h, i, j: torch.zeros(1, 2000)[b].sum() > 0, "2000 entries of a tensor"),
    "too_many_products": (
        lambda b, h, i, j: torch.dot(WIDE[b], WIDE[b + 1]) > 0,
        "at most 4000",
    ),
    "another_dimension": (lambda b, h, i, j: PLANE[i].sum(1) > 0, "dim"),
    "largest_and_where": (lambda b, h, i, j: PLANE[i].max(-1).values > 0, "amax"),
    "two_dimensions": (lambda b, h, i, j: PLANE[i].unsqueeze(-1).any() > 0, "unsqueeze"),
    "entry_beyond": (lambda b, h, i, j: (PLANE[i] > 0)[11], "11, of 11 entries"),
    "no_entry": (lambda b, h, i, j: PLANE[i, 3:3].amax(-1) > 0, "a row of no entries"),
    "not_boolean": (lambda b, h, i, j: i - j, "int expression"),
    "and_of_floats": (lambda b, h, i, j: (i / 2 & j) > 0, "operand of &"),
    "shift_of_floats": (lambda b, h, i, j: (i << j / 2) > 0, "operand of <<"),
    "invert_of_float": (lambda b, h, i, j: ~(i / 2) > 0, "operand of ~"),
    "where_of_int": (lambda b, h, i, j: torch.where(i, j, 0) > 0, "operand of where"),
    "string": (lambda b, h, i, j: i > "a", "str"),
    "none": (lambda b, h, i, j: None, "NoneType"),
    "power": (lambda b, h, i, j: i**-1 > 0, "exponent -1"),
    "power_of_a_position": (lambda b, h, i, j: i**j > 0, "base i, exponent j"),
    "power_zero": (lambda b, h, i, j: i.pow(0) > 0, "exponent 0"),
    "power_of_a_number": (lambda b, h, i, j: (i - j) % 3**h == 0, "base 3, exponent h, both whole"),
    "power_of_true": (lambda b, h, i, j: True ** (i > j) == 1, "both whole"),
    "power_of_a_tensor": (lambda b, h, i, j: i**THREE > 0, "exponent tensor[]"),
    "index_of_symbol": (lambda b, h, i, j: i[0] > 0, "an index"),
    "unknown_method": (lambda b, h, i, j: i.item() > 0, "attribute 'item'"),
    "shape": (lambda b, h, i, j: i.shape[0] > 0, "attribute 'shape'"),
    "complex": (lambda b, h, i, j: i * 1j == 0, "complex"),
    "complex_cast": (lambda b, h, i, j: i.to(torch.complex64) == 0, "complex64"),
    "clamp_of_nothing": (lambda b, h, i, j: i.clamp() > j, "got no bound"),
    "softplus": (lambda b, h, i, j: torch.nn.functional.softplus(i, beta=0) > j, "softplus beta"),
    "dict": (lambda b, h, i, j: i > {0: 3, 1: 5}[h], "hash()"),
    "set": (lambda b, h, i, j: (i > j) & (j in {0, 1}), "hash()"),
    "vmap": (lambda b, h, i, j: torch.vmap(lambda x: x)(i) > j, "ValueError: vmap"),
    "func_grad": (lambda b, h, i, j: torch.func.grad(lambda x: x * i)(ONE) > j, "RuntimeError: grad"),
    "arity": (lambda b, h: b > h, "takes 2 positional arguments"),
    "python_operator": (lambda b, h, i, j: i @ j > 2, "unsupported operand type"),
    "round": (lambda b, h, i, j: round(i) > j, "__round__"),
    "number_for_a_tensor": (lambda b, h, i, j: torch.maximum(i, 5) > j, "must be Tensor, not int"),
    "numpy_array": (lambda b, h, i, j: np.arange(11)[i] > j, "IndexError"),
    "one_operand": (lambda b, h, i, j: torch.where(i > j), "missing 2 required positional arguments"),
    "out": (lambda b, h, i, j: torch.sub(i, j, out=torch.empty(1)) > 0, "out"),
    "divided_by_zero": (lambda b, h, i, j: i // 0 == j, "got 0"),
    "modulo_zero": (lambda b, h, i, j: i % 0 == j, "got 0"),
    "number_too_wide": (lambda b, h, i, j: i < 2**61, "got 2305843009213693952"),
    "base": (lambda b, h, i, j: (-2.0) ** i > 0, "base -2.0"),
    "rounding_mode": (lambda b, h, i, j: torch.div(i, 2, rounding_mode="up") > 0, "'up'"),
    "uint8": (lambda b, h, i, j: i.to(torch.uint8) > 0, "torch.uint8"),
    "int8": (lambda b, h, i, j: i.to(dtype=torch.int8) > 0, "torch.int8"),
    "int16": (lambda b, h, i, j: i.type_as(THREE.short()) > 0, "torch.int16"),
    "method_argument": (lambda b, h, i, j: i.clamp(low=0) > j, "torch.Tensor.clamp at"),
    "method_operand": (lambda b, h, i, j: i.maximum() > j, "missing 1 required positional argument: 'other'"),
    "dimension": (lambda b, h, i, j: torch.max(i, 0) > j, "got other 0"),
    "no_method_of_a_tensor": (lambda b, h, i, j: i.silu() > j, "attribute 'silu'"),
    "ndim": (lambda b, h, i, j: i.ndim > 0, "attribute 'ndim'"),
    "requires_grad": (lambda b, h, i, j: i.requires_grad, "attribute 'requires_grad'"),
    "fill_too_wide": (lambda b, h, i, j: i.masked_fill(i > j, 0.5) > 0, "the float value 0.5 for the int expression i"),
    "new_size": (lambda b, h, i, j: i.new_ones(3) > 0, "got 3"),
    "custom_operator": (lambda b, h, i, j: torch.ops.tilewise_test.tanh(i) > 0, "torch.ops.tilewise_test.tanh at"),
    "custom_overload": (lambda b, h, i, j: torch.ops.tilewise_test.tanh.default(i) > 0, "test.tanh.default at"),
    "special": (lambda b, h, i, j: torch.special.erf(i) > 0, "torch.special.erf at"),
    "functional": (lambda b, h, i, j: torch.nn.functional.gelu(i) > 0, "torch.nn.functional.gelu at"),
    "tensor_method": (lambda b, h, i, j: ONE.atan2(i) > 0, "torch.Tensor.atan2 at"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_with_a_reason(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(FormulaError) as caught:
        tw.mask(function)
    assert said in str(caught.value)
    assert caught.value.expected


def test_what_is_offered_instead_is_public() -> None:
    with pytest.raises(FormulaError) as caught:
        tw.score(lambda s, b, h, i, j: torch.erf(s))
    offered = caught.value.expected.removeprefix("one of ").split(", ")
    assert {"tanh", "nn.functional.softplus", "special.expit"} <= {*offered}
    assert all(callable(operator.attrgetter(name)(torch)) and not name.startswith("_") for name in offered)


def test_an_unknown_method_is_not_a_matter_of_control_flow() -> None:
    with pytest.raises(FormulaError) as caught:
        tw.mask(lambda b, h, i, j: i.cumsum(0) > j)
    assert "attribute 'cumsum' of a traced value" in str(caught.value)
    assert "not" in caught.value.expected
    assert "control flow" not in str(caught.value)


def test_a_score_cannot_be_detached() -> None:
    for function in (lambda s, b, h, i, j: s + s.detach(), lambda s, b, h, i, j: s * SLOPES[h].detach()):
        with pytest.raises(FormulaError, match="detach at"):
            tw.score(function)


def test_messages_name_the_users_line() -> None:
    with pytest.raises(FormulaError, match=r"test_refused\.py:\d+"):
        tw.mask(lambda b, h, i, j: PLANE[i] > 0)
    with pytest.raises(FormulaError, match=r"test_refused\.py:\d+"):
        tw.score(lambda s, b, h, i, j: torch.special.erf(s))


def raising(error: Exception) -> None:
    raise error


def test_exceptions_of_the_function_itself_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        tw.mask(lambda b, h, i, j: i > 1 / 0)
    with pytest.raises(KeyError):
        tw.mask(lambda b, h, i, j: i > {}["size"])
    with pytest.raises(ValueError, match="no size"):
        tw.mask(lambda b, h, i, j: raising(ValueError("no size")))


@pytest.mark.parametrize("value", [3, "causal", torch.ones(2, 2, dtype=torch.bool), tw.softcap(2.0)], ids=repr)
def test_what_is_no_mask_is_refused(value: Any) -> None:
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(FormulaError, match="expected a Mask or a function"):
        tw.attention(q, q, q, mask=value)


@pytest.mark.parametrize("value", [3, tw.causal], ids=repr)
def test_what_is_no_score_is_refused(value: Any) -> None:
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(FormulaError, match="expected a Score or a function"):
        tw.attention(q, q, q, score=value)


# graphs --------------------------------------------------------------------------------------------------------------


def doubled(x: Any, times: int = 60) -> Any:
    """A graph of few nodes, which is beyond counting as a tree."""
    for _ in range(times):
        x = x + x
    return x


def chain(x: Any) -> Any:
    for _ in range(10_000):
        x = x + 1
    return x


ENDLESS: dict[str, Callable[..., Any]] = {
    "branch": lambda b, h, i, j: doubled(i) > 0 and j > 3,
    "branch_on_a_chain": lambda b, h, i, j: chain(i) > 0 and j > 3,
    "chain": lambda b, h, i, j: chain(i) > j,
    "kind": lambda b, h, i, j: doubled(i),
    "operand": lambda b, h, i, j: doubled(i * 0.5) & j > 2,
    "power": lambda b, h, i, j: doubled(i) ** -1 > 2,
    "index": lambda b, h, i, j: ORDER[doubled(i * 0.5)] > 0,
    "detached": lambda b, h, i, j: doubled(SLOPES[h]).detach() > 0.0,
    "fill": lambda b, h, i, j: i.masked_fill(i > j, doubled(j * 0.5)) > 0,
    "attribute": lambda b, h, i, j: doubled(i).cumsum(0) > 0,
    "string": lambda b, h, i, j: i > "a" * 10_000,
    "list": lambda b, h, i, j: i > [0] * 10_000,
    "nested": lambda b, h, i, j: i > doubled(tw.causal, 1),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_messages_about_large_formulas_come_soon_and_are_short(name: str) -> None:
    with pytest.raises(FormulaError) as caught:
        tw.mask(ENDLESS[name])
    assert len(str(caught.value).encode()) < 4096


def test_a_message_of_the_proof_is_short() -> None:
    q = torch.zeros(1, 3, 1, 4)
    with pytest.raises(FormulaError, match="index 0") as caught:
        tw.attention(q, q, q, mask=lambda b, h, i, j: ORDER[doubled(i, 50)] > 0)
    assert len(str(caught.value).encode()) < 4096


def test_names_of_what_is_joined_often_are_short() -> None:
    mask, score = tw.causal | tw.window(3, 2), tw.softcap(2.0)
    for _ in range(60):
        mask, score = mask & mask, score >> tw.softcap(3.0)
        mask = ~mask
    assert len(repr(mask)) < 1000
    assert len(repr(score)) < 1000
    for _ in range(3000):
        mask = ~mask
    assert len(repr(mask)) < 1000


def test_a_formula_is_as_large_as_its_graph() -> None:
    """What occurs twice counts once, is evaluated once and has one line in a kernel."""

    def folded(b: Any, h: Any, i: Any, j: Any) -> Any:
        y = j
        for k in range(8):
            y = torch.where(y > k, i - y, y + 1)
        return y > 3

    mask = tw.mask(folded)
    i, j = torch.arange(9)[:, None], torch.arange(9)
    assert torch.equal(mask.evaluate(i=i, j=j), folded(0, 0, i, j))
    assert len(mask.text) < 600
    twice = tw.mask(lambda b, h, i, j: doubled(i, 40) > j)
    assert torch.equal(twice.evaluate(i=i, j=j), doubled(i, 40) > j)
    assert tw.mask(lambda b, h, i, j: (i - j) * (i - j) > i).text == tw.mask(lambda b, h, i, j: (i - j) ** 2 > i).text


def test_graphs_are_solved_and_emitted_as_graphs() -> None:
    """Each takes one step for each node, not for each path."""

    def paths(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        both = s
        for _ in range(60):
            both = both * torch.tanh(both) + both
        seen = j <= i
        for _ in range(60):
            seen = (seen & (j <= 3)) | (seen & (i > h))
        return torch.where(seen, both + doubled(i - j).float(), doubled(s))

    score = tw.score(paths)
    mask = tw.mask(lambda b, h, i, j: paths(i * 0.5, b, h, i, j) > 3.0)
    both = tw.mask(lambda b, h, i, j: doubled(i, 60) - doubled(j, 60) < 3)
    for formula in (mask, both):
        rule = tile_rule(formula.text)
        assert rule.spans is None
        Emitter([]).function("f", ("i0", "i1", "j0", "j1"), [rule.sure, rule.maybe])
    root = score.structure.root
    assert linear(root, mask.structure.root) is None
    for made in (root, *base_2(root, root)[:1], *gradients(root, [])):
        Emitter([]).function("f", ("s", "i", "j"), [cheaper(made)])
    assert largest_size(score.text, score.numbers) == math.inf
