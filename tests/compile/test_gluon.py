"""A formula emitted as Gluon source compiles inside a Gluon kernel, for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.formula.emit import Captured, Emitter, number_arguments, tensor_arguments
from tilewise.formula.formula import Formula, as_mask, as_score
from tilewise.formula.optimize import cheaper, hoist
from tilewise.formula.source import import_source
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.offline import compiling_for, resources
from tilewise.tiles.hopper import with_columns

pytestmark = pytest.mark.rows("hopper")


@gluon.jit
def apply(
    S, OUT, b, h, mask_args, mask_nums, score_args, score_nums, MASK_ONCE: gl.constexpr, MASK_COLUMNS: gl.constexpr,
    VISIBLE: gl.constexpr, SCORE_ONCE: gl.constexpr, SCORE_COLUMNS: gl.constexpr, SCORE: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    at = i[:, None] * N + j[None, :]
    s = gl.load(S + at)
    if SCORE is not None:
        once = SCORE_ONCE(b, h, i[:, None], score_args, score_nums)
        once = with_columns(once, b, h, 0, N - 1, score_args, score_nums, SCORE_COLUMNS, layout, N)
        s = SCORE(s, b, h, i[:, None], j[None, :], once, score_args, score_nums)
    if VISIBLE is not None:
        once = MASK_ONCE(b, h, i[:, None], mask_args, mask_nums)
        once = with_columns(once, b, h, 0, N - 1, mask_args, mask_nums, MASK_COLUMNS, layout, N)
        s = gl.where(VISIBLE(b, h, i[:, None], j[None, :], once, mask_args, mask_nums), s, float("-inf"))
    gl.store(OUT + at, s)


def emitted(formula: Formula, parameters: tuple[str, ...], fast: bool = False) -> tuple[Any, Any, Any]:
    """(what is computed once for a row, for a tile's columns, the formula of a pair), as Gluon functions."""
    emitter = Emitter([Captured.of(t) for t in formula.tensors], dialect="gluon", fast=fast)
    hoisted, rest = hoist([cheaper(formula.structure.root)], "i")
    columns, (root,) = hoist(rest, "j", first=max(1, len(hoisted)), dear=True)
    sources = [emitter.once("once", ("b", "h", "i"), hoisted), emitter.function("value", (*parameters, "once"), [root])]
    if columns:
        sources.append(emitter.columns("columns", "j", columns))
    module = import_source(emitter.module(sources))
    return module.once, getattr(module, "columns", None), module.value


def arguments(formula: Formula) -> tuple[Any, Any]:
    return tensor_arguments(formula.tensors), number_arguments(formula.numbers, formula.structure.number_kinds)


@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("name", ["window", "document_window", "neighborhood_3d", "sliding_tile_heads",
                                  "sliding_tile_curve", "alibi_causal", "softcap_causal", "relative_bias",
                                  "many_operations", "bias", "head_blocks"])  # fmt: skip
def test_a_formula_compiles_as_gluon(name: str, sm: int) -> None:
    inputs = make_inputs(CASES[name], torch.float32)
    mask = score = (None, None, None)
    mask_arguments = score_arguments = ((), ())
    if inputs.mask is not None:
        formula = as_mask(inputs.mask.formula)
        mask = emitted(formula, ("b", "h", "i", "j"))
        mask_arguments = arguments(formula)
    if inputs.score is not None:
        formula = as_score(inputs.score.formula)
        score = emitted(formula, ("s", "b", "h", "i", "j"), fast=True)
        score_arguments = arguments(formula)
    s = torch.zeros(64, 64)
    with compiling_for(sm) as kernels:
        apply[(1,)](
            s, torch.zeros_like(s), 2, 3, *mask_arguments, *score_arguments, *mask, *score, 64, 64,
        )  # fmt: skip
    assert (mask[1] is not None) == name.startswith(("document", "neighborhood", "sliding_tile", "head_blocks"))
    assert resources(kernels[0]).spill_bytes <= 32  # what sine keeps in memory for large arguments
    if name == "softcap_causal":
        assert "tanh.approx.f32" in kernels[0].asm["ptx"]
