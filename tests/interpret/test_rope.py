"""The Triton kernel of `rope`: equal to PyTorch, bit for bit the CPU's, and broken twins are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops import triton_launch
from tilewise.ops.rope import triton_rope
from tilewise.testing import operators
from tilewise.testing import rope as cases
from tilewise.testing.rope import BY_NAME, CASES, TurnCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN
DTYPES = (torch.float32, torch.float16)
SIDE_BY_SIDE = [case for case in CASES if case.heads_k]


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: TurnCase, dtype: torch.dtype) -> None:
    cases.check(case, dtype, "triton")


@pytest.mark.parametrize("case", SIDE_BY_SIDE, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_side_by_side(case: TurnCase, dtype: torch.dtype) -> None:
    cases.check_joint(case, dtype, "triton")


@pytest.mark.parametrize("pairs", [1, 16, 64])
@pytest.mark.parametrize("name", ["batch", "heads_first", "odd_heads", "more_keys", "part_of_neighbours"])
def test_other_tiles(name: str, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_rope, "_PAIRS", pairs)
    cases.check(BY_NAME[name], torch.float32, "triton")
    cases.check_joint(BY_NAME[name], torch.float32, "triton")


def test_nan_stays_in_its_row() -> None:
    case = TurnCase("nan", heads_k=0)
    operators.poisoned(cases.ours(case, "triton"), cases.make_inputs(case, torch.float32), "q", 2)


@pytest.mark.parametrize("name", ["q", "k"])
def test_only_wanted_gradients_are_made(name: str) -> None:
    """Of gradients whose strides are 0."""
    inputs = cases.make_inputs(BY_NAME["batch"], torch.float32)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    given = {key: inputs[key].detach().requires_grad_(key == name) for key in ("q", "k")}
    turned = dict(zip(("q", "k"), tw.rope(**given, rope=rope, impl="triton"), strict=True))
    (found,) = torch.autograd.grad(turned[name].sum(), given[name])
    back = tw.Rope(rope.cos, -rope.sin, rope.positions)
    assert torch.equal(found, tw.rope(torch.ones_like(given[name].detach()), rope=back, impl="cpu"))


def test_no_tokens() -> None:
    q = torch.zeros(2, 0, 3, 8, requires_grad=True)
    o = tw.rope(q, rope=tw.Rope(*torch.ones(2, 4, 4), torch.zeros(0, dtype=torch.int64)), impl="triton")
    o.sum().backward()
    assert o.shape == q.grad.shape == q.shape


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for _ in range(2):
        for name in ("batch", "neighbours", "packed", "q_alone", "part", "part_of_neighbours", "part_of_odd", "joint"):
            cases.check(BY_NAME[name], torch.float32, "triton")
            if BY_NAME[name].heads_k:
                cases.check_joint(BY_NAME[name], torch.float32, "triton")


TWINS = [  # memory that is never written shows in place
    ("b.to(tl.float32) * cos + a", "b.to(tl.float32) * cos - a", "batch"),
    ("        sin = -sin", "        sin = sin", "batch"),
    ("token // seqlen).to", "token // tokens).to", "heads_first"),
    ("sequence * (strides[0]", "sequence * (strides[1]", "joint"),
    ("tl.load(rows + HALF + pair", "tl.load(rows + pair", "q_alone"),
    ("(head_k < HEADS_K)", "(head_k < HEADS_Q - 4)", "odd_heads"),
    ("tl.load(rows + dim, mask=inside & (dim < DIM))", "tl.load(rows + dim - 1, mask=inside & (dim < DIM))", "part"),
    ("(dim < DIM))\n        tl.store", "(dim < ROTARY + BLOCK))\n        tl.store", "part_of_rows"),
    ("(dim < 2 * HALF), other", "(dim < HALF), other", "part_of_neighbours"),
    ("program % PARTS * BLOCK_Q", "0 * BLOCK_Q", "parts"),
    ("program // PARTS * BLOCK_T", "program // PARTS", "many_tokens"),
]
OTHERS = {
    "part_of_rows": TurnCase("part_of_rows", dim=24, rotary_dim=4),
    "parts": TurnCase("parts", (2, 2), 40, 4, 256, 256),
}


@pytest.mark.parametrize(("old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(old: str, new: str, name: str, tmp_path: Path, monkeypatch) -> None:
    case = (BY_NAME | OTHERS)[name]
    cases.check(case, torch.float32, "triton")  # whole, it passes
    copy = broken_copy(triton_rope, old, new, tmp_path)
    monkeypatch.setattr(triton_rope, "rope_pairs", copy.rope_pairs)
    with pytest.raises(AssertionError):
        cases.check(case, torch.float32, "triton")


JOINT_TWINS = [  # of what is copied
    ("heads_of(OV, strides_ov, sequence", "heads_of(OV, strides_ov, 0 * sequence", "batch"),
    ("heads_of(V, strides_v", "heads_of(V, strides_k", "heads_first"),
    ("load_pairs(v, inside_k, HALF, False", "load_pairs(v, inside_k, HALF, INTERLEAVED", "neighbours"),
    ("inside_k, a_v, b_v", "inside_k, b_v, a_v", "batch"),
    ("inside_k, a_v, b_v", "inside_k, *turned(a_v, b_v, cos, sin)", "packed"),
    ("copy_rest(v, ov, inside_k, ROTARY", "copy_rest(v, ov, inside_k, ROTARY + 1", "part"),
]


@pytest.mark.parametrize(("old", "new", "name"), JOINT_TWINS)
def test_a_broken_twin_is_caught_side_by_side(old: str, new: str, name: str, tmp_path: Path, monkeypatch) -> None:
    case = BY_NAME[name]
    cases.check_joint(case, torch.float32, "triton")  # whole, it passes
    copy = broken_copy(triton_rope, old, new, tmp_path)
    monkeypatch.setattr(triton_rope, "rope_pairs", copy.rope_pairs)
    with pytest.raises(AssertionError):
        cases.check_joint(case, torch.float32, "triton")
