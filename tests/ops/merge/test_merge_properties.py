"""Merging on a CPU, by every implementation that runs there: equal to softmax over states, in all forms and dtypes."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.testing import merging
from tilewise.testing.matrix import name_of
from tilewise.testing.merging import BY_NAME, CASES, MergeCase, Setting

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SETTINGS = [Setting(impl, dtype) for impl in ("cpu", "reference") for dtype in DTYPES]
QUICK = [case for case in CASES if case.name != "many_heads"]


@pytest.mark.parametrize("case", QUICK, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_equals_softmax(setting: Setting, case: MergeCase) -> None:
    if case.out is not None and setting.dtype == torch.float64:
        case = MergeCase(case.name, out=torch.float64)
    merging.equals_softmax(setting, case)


def test_thousands_of_heads() -> None:
    merging.equals_softmax(Setting("cpu", torch.bfloat16), BY_NAME["many_heads"])


@pytest.mark.parametrize(("check", "setting", "case"), merging.property_matrix(SETTINGS), ids=name_of)
def test_property(check: merging.Check, setting: Setting, case: MergeCase) -> None:
    check(setting, case)


def test_wider_states_decide_the_dtype() -> None:
    lse = torch.zeros(1, 2, 3)
    o = {dtype: torch.ones(1, 3, 2, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    half, other, single = ((o[dtype], lse) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    assert tw.merge(half, half)[0].dtype == torch.bfloat16
    assert tw.merge(half, other)[0].dtype == torch.float32
    assert tw.merge(half, single)[0].dtype == torch.float32
    assert tw.merge(half, single, dtype=torch.float16)[0].dtype == torch.float16
    nine = tw.merge(*[half] * 8, single)
    assert nine[0].dtype == torch.float32
    torch.testing.assert_close(nine[1], torch.full_like(lse, 9.0).log())


def test_without_rows_or_states() -> None:
    for shape in ((2, 0, 3, 8), (0, 5, 3, 8), (0, 3, 8)):
        o, lse = torch.zeros(shape), torch.zeros(*shape[:-3], shape[-2], shape[-3])
        merged = tw.merge((o, lse), (o, lse))
        assert (merged[0].shape, merged[1].shape) == (o.shape, lse.shape)
    o, lse = tw.merge_states(torch.zeros(0, 2, 5, 3, 8), torch.zeros(0, 2, 3, 5))
    assert o.shape == (2, 5, 3, 8)
    assert bool((lse == -torch.inf).all())
    leaf = torch.zeros(0, 3, 8, requires_grad=True)
    o, lse = tw.merge_states(leaf, torch.zeros(3, 0), indptr=torch.zeros(5, dtype=torch.int32))
    assert (o.shape, lse.shape) == ((4, 3, 8), (3, 4))
    assert not o.any()
    (grad,) = torch.autograd.grad(o.sum(), leaf)
    assert grad.shape == leaf.shape


# against attention ---------------------------------------------------------------------------------------------------


def whole_and_parts(
    cuts: list[int], dtype: torch.dtype, *, batch: int, seqlen: int, heads: int, causal: bool
) -> tuple[list[torch.Tensor], merging.Results, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(q, k, v), attention over all keys, and its states over runs of keys that end at `cuts`. If `causal`, the first
    queries see no key of the later runs.
    """
    make = torch.Generator().manual_seed(sum(cuts) + seqlen)
    rows_k = cuts[-1]
    q = torch.randn(batch, seqlen, heads, 8, generator=make, dtype=torch.float64).to(dtype)
    k, v = (torch.randn(batch, rows_k, heads, 8, generator=make, dtype=torch.float64).to(dtype) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    states = []
    for begin, end in zip([0, *cuts[:-1]], cuts, strict=True):
        shift = begin + (end - begin) - rows_k  # the part's last query stands at its last key
        mask = tw.mask(lambda b, h, i, j, shift=shift: j + shift <= i) if causal else None
        states.append(tw.attention_with_lse(q, k[:, begin:end], v[:, begin:end], mask=mask, impl="reference"))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    o, lse = tw.attention_with_lse(*wide, mask=tw.causal if causal else None, impl="reference")
    ones = torch.ones_like(o), torch.ones_like(lse).masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((o, lse), wide, ones)
    names = ("o", "lse", "dq", "dk", "dv")
    return inputs, dict(zip(names, (o.detach(), lse.detach(), *grads), strict=True)), states


splits = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(
    lambda sizes: [sum(sizes[: n + 1]) for n in range(len(sizes))]
)


@settings(max_examples=60)
@given(
    cuts=splits.filter(lambda cuts: cuts[-1] > 0),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 2),
    seqlen=st.integers(1, 6),
    heads=st.integers(1, 3),
    causal=st.booleans(),
    impl=st.sampled_from(["cpu", "reference"]),
    form=st.sampled_from(["separate", "stacked", "ragged"]),
)
def test_parts_of_the_keys_merge_to_attention_over_all(
    cuts: list[int], dtype: torch.dtype, batch: int, seqlen: int, heads: int, causal: bool, impl: str, form: str
) -> None:
    """Each o is off by its rounding, and so is what is stored; lse is off by its own, which multiplies weights."""
    inputs, want, states = whole_and_parts(cuts, dtype, batch=batch, seqlen=seqlen, heads=heads, causal=causal)
    if form == "separate":
        o, lse = tw.merge(*states, impl=impl)
    elif form == "stacked":
        o, lse = tw.merge_states(torch.stack([o for o, _ in states]), torch.stack([y for _, y in states]), impl=impl)
    else:  # every query has its states one after another
        o = torch.stack([o.flatten(0, 1) for o, _ in states], 1).flatten(0, 1)
        lse = torch.stack([y.transpose(0, 1).flatten(1, 2) for _, y in states], 2).flatten(1, 2)
        indptr = torch.arange(batch * seqlen + 1, dtype=torch.int32) * len(states)
        o, lse = tw.merge_states(o, lse, indptr=indptr, impl=impl)
        o, lse = o.view(batch, seqlen, heads, -1), lse.view(heads, batch, seqlen).transpose(0, 1)
    unit, unit_lse = torch.finfo(dtype).eps, torch.finfo(lse.dtype).eps
    seen = [float(y.detach()[y.isfinite()].abs().max()) if y.isfinite().any() else 0.0 for _, y in states]
    largest, largest_lse = max(float(o.detach().abs().max()) for o, _ in states), max(seen)
    near = unit * largest + 4 * unit_lse * (1 + largest_lse) * largest
    assert merging.error(o, want["o"]) <= near
    assert merging.error(lse, want["lse"]) <= 4 * unit_lse * (1 + largest_lse)
    if dtype != torch.float64:
        return
    grads = torch.autograd.grad((o, lse), inputs, (torch.ones_like(o), (lse != -torch.inf).to(lse.dtype)))
    for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(grad, want[name], rtol=1e-11, atol=1e-11)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_order_and_grouping_matter_by_rounding_alone(sizes: list[int], seed: int, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(seed)
    count = sum(sizes)
    states = [(torch.randn(1, 3, 2, 8, generator=make, dtype=dtype),
               torch.randn(1, 2, 3, generator=make, dtype=dtype) * 5) for _ in range(count)]  # fmt: skip
    states[0] = (states[0][0], torch.full_like(states[0][1], -torch.inf))
    flat = tw.merge(*states)
    groups, at = [], 0
    for size in sizes:
        groups.append(tw.merge(*states[at : at + size]))
        at += size
    bound = 2 * (count + 4) * torch.finfo(dtype).eps
    for other in (tw.merge(*groups), functools.reduce(tw.merge, states), tw.merge(*reversed(states))):
        assert merging.error(other[0], flat[0]) <= bound * max(float(o.abs().max()) for o, _ in states)
        assert merging.error(other[1], flat[1]) <= bound * (1 + float(flat[1].abs().max()))


# gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["pair", "three_packed", "stacked", "ragged"])
def test_gradcheck(impl: str, name: str) -> None:
    case = merging.MergeCase(**{**vars(BY_NAME[name]), "head_dim": 3, "seqlen": 2, "unseen": False, "spread": 1.0})
    inputs = merging.make_inputs(case, torch.float64)
    rows = slice(None) if case.counts is None else torch.tensor(case.counts) > 0  # lse is -inf in the others

    def merged(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = len(leaves) // 2
        if half == 1:
            o, lse = tw.merge_states(leaves[0], leaves[1], indptr=inputs.indptr, impl=impl)
        else:
            o, lse = tw.merge(*zip(leaves[:half], leaves[half:], strict=True), impl=impl)
        return o, lse[..., rows]

    assert torch.autograd.gradcheck(merged, (*inputs.o, *inputs.lse))


def test_a_state_without_keys_has_second_derivatives_of_zero() -> None:
    o = torch.randn(2, 1, 2, 1, 4, dtype=torch.float64)
    lse = torch.tensor([[[[0.5, -torch.inf]]], [[[-torch.inf, -torch.inf]]]], dtype=torch.float64)
    o[1] = torch.nan
    o, lse = o.requires_grad_(), lse.requires_grad_()
    merged, total = tw.merge_states(o, lse)
    loss = merged.square().sum() + total[..., :1].square().sum()
    first = torch.autograd.grad(loss, (o, lse), create_graph=True)
    for second in torch.autograd.grad(sum(x.square().sum() for x in first), (o, lse)):
        assert second.isfinite().all()
        assert (second[1] == 0.0).all()
