"""Emitted device functions against PyTorch's evaluation of a formula: masks, scores, slopes, captured gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings

from tilewise.formula.emit import Captured, encoded, number_arguments, tensor_arguments
from tilewise.formula.evaluate import evaluate
from tilewise.formula.formula import Formula, as_mask, as_score
from tilewise.ops.attention.variant import mask_functions, score_functions
from tilewise.schedule.rule import tile_rule
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.strategies import (
    Tree,
    as_mask_function,
    as_score_function,
    bool_trees,
    captured_tensors,
    far_trees,
    float_trees,
)

ROWS, COLS = 16, 32  # positions of queries and keys
FIRST = 3  # the first query's position
EXAMPLES = hypothesis_settings(max_examples=25, phases=[Phase.generate])


@triton.jit
def apply_mask(
    OUT, b, h, first, args, nums, ONCE: tl.constexpr, VISIBLE: tl.constexpr, ENDS: tl.constexpr, BY_KEY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    i = first + tl.arange(0, M)
    j = tl.arange(0, N)
    if BY_KEY:
        mine = j
        other = i
        out = OUT + (i - first)[None, :] * N + j[:, None]
    else:
        mine = i
        other = j
        out = OUT + (i - first)[:, None] * N + j[None, :]
    if ENDS is not None:
        start, end = ENDS(b, h, mine, args, nums)
        start = start + tl.zeros_like(mine)
        end = end + tl.zeros_like(mine)
        seen = (other[None, :] >= start[:, None]) & (other[None, :] <= end[:, None])
    else:
        once = ()
        if ONCE is not None:
            once = ONCE(b, h, mine[:, None], args, nums)
        if BY_KEY:
            seen = VISIBLE(b, h, i[None, :], j[:, None], once, args, nums)
        else:
            seen = VISIBLE(b, h, i[:, None], j[None, :], once, args, nums)
    tl.store(out, (seen & (other[None, :] == other[None, :])).to(tl.int8))


@triton.jit
def apply_score(
    OUT, SLOPES, S, G, b, h, first, args, nums, grads, ONCE: tl.constexpr, APPLY: tl.constexpr, SLOPE: tl.constexpr,
    ACCUMULATE: tl.constexpr, BY_KEY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    i = first + tl.arange(0, M)
    j = tl.arange(0, N)
    if BY_KEY:
        at = (i - first)[None, :] * N + j[:, None]
        mine = j
        i = i[None, :]
        j = j[:, None]
    else:
        at = (i - first)[:, None] * N + j[None, :]
        mine = i
        i = i[:, None]
        j = j[None, :]
    s = tl.load(S + at)
    g = tl.load(G + at)
    once = ()
    if ONCE is not None:
        once = ONCE(b, h, mine[:, None], args, nums)
    applied = APPLY(s, b, h, i, j, once, args, nums)
    slope = SLOPE(g, s, b, h, i, j, once, args, nums)
    tl.static_assert(applied.shape == s.shape and slope.shape == s.shape)
    tl.store(OUT + at, applied)
    tl.store(SLOPES + at, slope)
    if ACCUMULATE is not None:
        ACCUMULATE(g, s, b, h, i, j, once, g, grads, args, nums)


def _captured(formula: Formula) -> tuple[Captured, ...]:
    return tuple(Captured.of(t) for t in formula.tensors)


def _arguments(formula: Formula) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tensor_arguments(formula.tensors), number_arguments(formula.numbers, formula.structure.number_kinds)


def _symbols(b: int, h: int) -> dict[str, torch.Tensor]:
    i = torch.arange(FIRST, FIRST + ROWS)[:, None]
    return {"b": torch.tensor(b), "h": torch.tensor(h), "i": i, "j": torch.arange(COLS)}


def _emitted_mask_is_the_formula(mask: Any, b: int, h: int) -> None:
    tables = tuple(Captured(len(t.dims), True) for t in tile_rule(mask.text).tables)
    functions = mask_functions(mask.text, _captured(mask), tables)
    # float32 and float64 may disagree on a comparison of floats; there either is right
    narrow, wide = (
        mask.evaluate(dtype=dtype, **_symbols(b, h)).expand(ROWS, COLS) for dtype in (torch.float32, torch.float64)
    )
    sure = narrow == wide
    for by_key in (False, True):
        side = functions.keys if by_key else functions.queries
        out = torch.zeros(ROWS, COLS, dtype=torch.int8)
        apply_mask[(1,)](out, b, h, FIRST, *_arguments(mask), side.once, side.visible, side.rows, by_key, ROWS, COLS)
        assert torch.equal(out.bool()[sure], narrow[sure]), f"by_key={by_key}: {mask.text}"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mask and case.interpret])
def test_every_named_mask(name: str) -> None:
    on_a_grid = name in ("neighborhood_2d", "neighborhood_3d")
    inputs = make_inputs(CASES[name] if on_a_grid else CASES[name].with_(seqlen_q=65, seqlen_k=65), torch.float32)
    assert inputs.mask is not None
    _emitted_mask_is_the_formula(as_mask(inputs.mask.formula), len(CASES[name].lengths) - 1, CASES[name].heads_q - 1)


@EXAMPLES
@given(tree=bool_trees())
def test_any_mask(tree: Tree) -> None:
    _emitted_mask_is_the_formula(as_mask(as_mask_function(tree, captured_tensors())), 1, 2)


@EXAMPLES
@given(tree=far_trees())
def test_any_mask_of_integers_that_wrap(tree: Tree) -> None:
    _emitted_mask_is_the_formula(as_mask(as_mask_function(tree, captured_tensors())), 1, 2)


NARROW = torch.tensor([2**31 - 1, -(2**31), 2**30, 7] * 16, dtype=torch.int32)
WIDTHS: dict[str, Any] = {  # what 32 bits do not hold, of operands that they hold
    "numbers": lambda b, h, i, j: i - j + 500_000_000 + 500_000_000 + 500_000_000 + 500_000_000 + 500_000_000 > 0,
    "captured_once": lambda b, h, i, j: NARROW[i] + j > 2**31 - 1,
    "captured_sum": lambda b, h, i, j: NARROW[i] - NARROW[j] > 5,
    "negated": lambda b, h, i, j: -NARROW[i] > j,
    "absolute": lambda b, h, i, j: abs(NARROW[i]) > j,
    "divided": lambda b, h, i, j: NARROW[i] // (h - 3) > j,
    "doubled": lambda b, h, i, j: functools.reduce(lambda x, _: x + x, range(40), i - j) > 0,
    "tripled": lambda b, h, i, j: functools.reduce(lambda x, _: x + x + x, range(25), i - j) % 7 > 2,
    "shifted": lambda b, h, i, j: (i - j << 40) > (j << 39),
    "shifted_back": lambda b, h, i, j: (NARROW[i] >> j) + (NARROW[j] >> 33) > -1,
    "shifted_by_less": lambda b, h, i, j: (i << j - 4) + (-i >> j - 4) > 3,
    "shifted_number": lambda b, h, i, j: 1 << j > i,
    "morton": lambda b, h, i, j: (_spread(i) | (_spread(j) << 1)) & 0x7FFF > 99,
    "bits": lambda b, h, i, j: ((i ^ j) & 5 | ~i) < (i > j) + -3,
}


def _spread(x: Any) -> Any:
    """Bits of a number on every second place."""
    for by, kept in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        x = (x | (x << by)) & kept
    return x


@pytest.mark.parametrize("name", WIDTHS)
def test_integers_are_as_wide_as_pytorchs(name: str) -> None:
    _emitted_mask_is_the_formula(as_mask(WIDTHS[name]), 1, 2)


BLOCKS = torch.randint(0, 4, (2, 3, 5, 3), generator=torch.Generator().manual_seed(0))
FLAGS = torch.rand(64, 4, generator=torch.Generator().manual_seed(0)) < 0.5
ROW_MASKS: dict[str, Any] = {  # of what is captured without its last index
    "blocks": lambda b, h, i, j: (BLOCKS[b, h, i // 4] == (j // 8).unsqueeze(-1)).any(-1),
    "all": lambda b, h, i, j: (~FLAGS[i] | FLAGS[j]).all(-1),
    "count": lambda b, h, i, j: (FLAGS[i] & FLAGS[j]).sum(-1) > 1,
    "largest": lambda b, h, i, j: BLOCKS[b, h, i // 4].amax(-1) * 8 >= j + BLOCKS[b, h, i // 4, 1:].min(),
}


@pytest.mark.parametrize("name", ROW_MASKS)
def test_masks_of_rows(name: str) -> None:
    _emitted_mask_is_the_formula(as_mask(ROW_MASKS[name]), 1, 2)


def _emitted_score_is_the_formula(score: Any, wanted: tuple[bool, ...], b: int, h: int) -> None:
    functions = score_functions(score.text, _captured(score), wanted, False)
    generator = torch.Generator().manual_seed(0)
    s, g = (torch.randn(ROWS, COLS, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = s.clone().requires_grad_()
    leaves = [t.detach().double().requires_grad_() if w else t for t, w in zip(score.tensors, wanted, strict=True)]

    def value(dtype: torch.dtype, at: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        return evaluate([score.structure.root], {**_symbols(b, h), "s": at}, tensors, score.numbers, dtype)[0].expand(
            ROWS, COLS
        )

    want = value(torch.float64, exact, leaves)
    want = want + 0.0 * exact  # a formula need not read s
    inputs = [exact, *(leaf for leaf in leaves if leaf.requires_grad)]
    slope, *captured = torch.autograd.grad(want, inputs, g, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        near = value(torch.float32, s.float(), [t.detach() for t in score.tensors]).double()
        moved = value(torch.float64, s + 1e-5, [t.detach() for t in score.tensors])
    # steps and kinks: where float32, or a score next to it, takes another branch, either is right
    steady = (near - want).abs() + (moved - want).abs() < 1e-3 * (1 + want.abs() + slope.abs())
    for by_key in (False, True):
        side = functions.keys if by_key else functions.queries
        out, slopes = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
        buffers = [torch.zeros(t.shape) for t, w in zip(score.tensors, wanted, strict=True) if w]
        grads = tuple(x for buffer in buffers for x in (buffer, *map(encoded, buffer.stride())))
        arguments = (*_arguments(score), grads)
        apply_score[(1,)](
            out, slopes, s.float(), g.float(), b, h, FIRST, *arguments, side.once, side.apply, side.slope,
            side.accumulate, by_key, ROWS, COLS,
        )  # fmt: skip
        torch.testing.assert_close(out.double()[steady], want.detach()[steady], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(slopes.double()[steady], slope[steady], rtol=2e-3, atol=2e-3)
        if side.accumulate is not None:
            for buffer, grad in zip(buffers, captured, strict=True):
                torch.testing.assert_close(buffer.double(), grad, rtol=1e-3, atol=1e-3)
    assert any(wanted) == (functions.queries.accumulate is not None)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.score and case.interpret])
def test_every_named_score(name: str) -> None:
    inputs = make_inputs(CASES[name].with_(seqlen_q=65, seqlen_k=65), torch.float32)
    assert inputs.score is not None
    score = as_score(inputs.score.formula)
    wanted = tuple(t.requires_grad for t in score.tensors)
    _emitted_score_is_the_formula(score, wanted, len(CASES[name].lengths) - 1, CASES[name].heads_q - 1)


Q_PE, K_PE, W_PE = (torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (40, 50, 3))
ROW_SCORES: dict[str, Any] = {
    "dot": lambda s, b, h, i, j: s + (Q_PE[i] * K_PE[j]).sum(-1),
    "by_head": lambda s, b, h, i, j: s * torch.sigmoid(torch.dot(W_PE[h], K_PE[j])) + (W_PE[h] - Q_PE[i]).mean(-1),
    "largest": lambda s, b, h, i, j: s - (Q_PE[i] - K_PE[j]).abs().amax(-1),
}


@pytest.mark.parametrize("name", ROW_SCORES)
def test_scores_of_rows(name: str) -> None:
    score = as_score(ROW_SCORES[name])
    _emitted_score_is_the_formula(score, (True,) * len(score.tensors), 1, 2)


@EXAMPLES
@given(tree=float_trees())
def test_any_score(tree: Tree) -> None:
    score = as_score(as_score_function(tree, captured_tensors()))
    _emitted_score_is_the_formula(score, (False,) * len(score.tensors), 1, 2)
