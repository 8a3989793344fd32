"""What must hold of every implementation of `merge` and `merge_states`, on any device, else AssertionError.

The truth is softmax over a dense dimension of states in float64, gradients by autograd. Budgets are those of
`tilewise.testing.budgets`: twice plain PyTorch's error at the same dtype, plus a floor for sums in another order and
for the rounding of what is stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

import tilewise as tw
from tilewise.testing.budgets import FACTOR, ORDER, error
from tilewise.testing.properties import Setting

Results = dict[str, torch.Tensor]
_WEIGHTY = -14.0  # the exponent of a weight above a millionth: an error in any other is never seen


@dataclass(frozen=True)
class MergeCase:
    """States to be merged. `counts` of states for each row make it ragged; else `states` for each, in one tensor if
    `stacked`; batch None is packed. A tenth of the states saw no key if `unseen`; `sliced` ones lie in wider tensors.
    """

    name: str
    states: int = 2
    batch: int | None = 2
    seqlen: int = 7
    heads: int = 3
    head_dim: int = 32
    stacked: bool = False
    counts: tuple[int, ...] | None = None
    unseen: bool = True
    sliced: bool = False
    spread: float = 3.0
    out: torch.dtype | None = None

    def __repr__(self) -> str:
        return self.name


CASES = [
    MergeCase("pair"),
    MergeCase("one", states=1),
    MergeCase("three_packed", states=3, batch=None),
    MergeCase("nine", states=9, seqlen=3),
    MergeCase("far_apart", spread=60.0),
    MergeCase("sliced", sliced=True, heads=2, head_dim=16),
    MergeCase("float32_out", out=torch.float32),
    MergeCase("many_heads", batch=1, seqlen=1, heads=1100, head_dim=16),
    MergeCase("stacked", states=5, stacked=True),
    MergeCase("stacked_packed", states=20, batch=None, seqlen=5, stacked=True, head_dim=64),
    MergeCase("stacked_sliced", states=3, stacked=True, sliced=True, head_dim=16),
    MergeCase("stacked_wide", states=3, batch=1, seqlen=2, stacked=True, head_dim=600),
    MergeCase("ragged", counts=(0, 3, 1, 0, 7, 2, 0), batch=None, head_dim=40),
    MergeCase("ragged_long", counts=(37,), batch=None, heads=2, head_dim=16),
    MergeCase("ragged_empty", counts=(0, 0), batch=None),
    MergeCase("ragged_sliced", counts=(2, 0, 5), batch=None, sliced=True),
]
for _dim in (1, 5, 17, 33, 80):
    CASES.append(MergeCase(f"head_dim_{_dim}", seqlen=3, head_dim=_dim))
BY_NAME = {case.name: case for case in CASES}


@dataclass
class Inputs:
    """Tensors of one case, and the gradients that come in."""

    case: MergeCase
    o: list[torch.Tensor]
    lse: list[torch.Tensor]
    indptr: torch.Tensor | None
    do: torch.Tensor
    dlse: torch.Tensor


def make_inputs(case: MergeCase, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Reproducible tensors."""
    make = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    rows = (case.seqlen,) if case.batch is None else (case.batch, case.seqlen)
    total = case.seqlen if case.counts is None else sum(case.counts)
    shape = (*rows[:-1], total, case.heads, case.head_dim)
    lead = (case.states,) if case.stacked else ()
    tensors = 1 if case.stacked or case.counts is not None else case.states
    o, lse = [], []
    for _ in range(tensors):
        x = draw(*lead, *shape).to(dtype)
        y = draw(*lead, *shape[:-3], case.heads, total) * case.spread
        if case.unseen:
            y = y.masked_fill(torch.rand(y.shape, generator=make) < 0.1, -math.inf)
        y = y.to(wide)
        if case.sliced:
            x, y = torch.cat([x, x], -1)[..., : case.head_dim], torch.cat([y, y], -1)[..., : y.shape[-1]]
        o.append(_on(x, device))
        lse.append(_on(y, device))
    indptr, merged = None, shape
    if case.counts is not None:
        indptr = torch.tensor([0, *case.counts]).cumsum(0).to(torch.int32).to(device)
        merged = (len(case.counts), *shape[1:])
    out = case.out or dtype
    do, dlse = draw(*merged).to(out), draw(*merged[:-3], case.heads, merged[-3]).to(wide)
    return Inputs(case, o, lse, indptr, do.to(device), dlse.to(device))


def _on(x: torch.Tensor, device: str) -> torch.Tensor:
    """On the device, its strides kept."""
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return there.copy_(x).requires_grad_()


def run(setting: Setting, inputs: Inputs) -> Results:
    """Results by name: o, lse, and the gradients do0, do1, ..., dlse0, ..."""
    options = {"dtype": inputs.case.out, "impl": setting.impl}
    if inputs.case.stacked or inputs.indptr is not None:
        o, lse = tw.merge_states(inputs.o[0], inputs.lse[0], indptr=inputs.indptr, **options)  # type: ignore[arg-type]
    else:
        o, lse = tw.merge(*zip(inputs.o, inputs.lse, strict=True), **options)  # type: ignore[arg-type]
    return _with_gradients(inputs, o, lse)


def _with_gradients(inputs: Inputs, o: torch.Tensor, lse: torch.Tensor) -> Results:
    leaves = (*inputs.o, *inputs.lse)
    grads = torch.autograd.grad((o, lse), leaves, (inputs.do.to(o.dtype), inputs.dlse.to(lse.dtype)))
    names = [f"{kind}{n}" for kind in ("do", "dlse") for n in range(len(inputs.o))]
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


# the truth -----------------------------------------------------------------------------------------------------------


def _dense(inputs: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """All states as (states, ..., rows, heads, head_dim) and lse (states, ..., rows, heads), missing ones -inf."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if inputs.indptr is None:
        o = inputs.o[0] if inputs.case.stacked else torch.stack(inputs.o)
        lse = inputs.lse[0] if inputs.case.stacked else torch.stack(inputs.lse)
        return o.to(dtype), lse.to(wide).transpose(-1, -2)
    first, count = inputs.indptr[:-1].long(), inputs.indptr.long().diff()
    nth = torch.arange(max(1, int(count.max())), device=first.device)[:, None]
    there = nth < count
    if not inputs.o[0].shape[0]:
        shape = (*there.shape, *inputs.o[0].shape[1:])
        nothing = inputs.o[0].sum() + inputs.lse[0].sum()  # keeps the leaves in the graph
        return nothing.to(dtype).expand(shape), (nothing.to(wide) - math.inf).expand(shape[:-1])
    index = torch.where(there, first + nth, 0)
    lse = torch.where(there[..., None], inputs.lse[0].t()[index].to(wide), -math.inf)
    return inputs.o[0][index].to(dtype), lse


def _by_softmax(inputs: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, lse) merged in plain PyTorch with products in `dtype`, and the weights and states that they came from."""
    states, lse = _dense(inputs, dtype)
    unseen = lse == -math.inf
    empty = unseen.all(0)
    safe = torch.where(empty, 0.0, lse)
    weights = torch.where(unseen, 0.0, torch.softmax(safe, 0))
    states = torch.where(unseen[..., None], 0.0, states)
    o = (weights.to(dtype)[..., None] * states).sum(0)
    total = torch.where(empty, -math.inf, torch.logsumexp(safe, 0)).transpose(-1, -2)
    return o, total, weights, states


@functools.lru_cache(maxsize=256)
def expectation(case: MergeCase, dtype: torch.dtype, device: str = "cpu") -> tuple[Results, dict[str, float]]:
    """What a case must give at `dtype`, in float64, and how near."""
    inputs = make_inputs(case, dtype, device)
    o, lse, weights, states = _by_softmax(inputs, torch.float64)
    want = _with_gradients(inputs, o, lse)
    by_hand = _with_gradients(inputs, *_by_softmax(inputs, dtype)[:2])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    units = [torch.finfo(x).eps / 2 for x in (wide, dtype, case.out or dtype)]
    with torch.no_grad():
        finite = torch.where(weights > math.exp(_WEIGHTY), weights, 1.0)
        steps = ORDER * units[0] * (1.0 - float(finite.log().min()) if finite.numel() else 1.0)
        size_do, size_o = float(inputs.do.abs().max()), float(states.abs().max()) if states.numel() else 0.0
        into = float(inputs.dlse.abs().max()) + 2.0 * float(inputs.do.double().abs().sum(-1).max()) * size_o
        lse_size = 1.0 + _largest(want["lse"])
    floors = {"o": (steps * size_o, units[2]), "lse": (ORDER * units[0] * lse_size, units[0]),
              "do": (steps * size_do, units[1]), "dlse": (steps * into, units[0])}  # fmt: skip
    allowed = {}
    for name, value in want.items():
        order, stored = floors[name.rstrip("0123456789")]
        allowed[name] = FACTOR * error(by_hand[name], value) + order + stored * _largest(value)
    return want, allowed


def _largest(x: torch.Tensor) -> float:
    finite = x.detach()[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


# properties ----------------------------------------------------------------------------------------------------------


def equals_softmax(setting: Setting, case: MergeCase) -> None:
    """o, lse and every gradient are those of softmax over the states."""
    want, allowed = expectation(case, setting.dtype, setting.device)
    got = run(setting, make_inputs(case, setting.dtype, setting.device))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, f"{name}: shape {tuple(got[name].shape)}, not {tuple(value.shape)}"
        found = error(got[name], value)
        assert found <= allowed[name], f"{name}: off by {found:.3g}, allowed {allowed[name]:.3g}"


def repeats_are_equal(setting: Setting, case: MergeCase) -> None:
    """The same bits again."""
    first = run(setting, make_inputs(case, setting.dtype, setting.device))
    same_bits(first, run(setting, make_inputs(case, setting.dtype, setting.device)))


def unseen_states_may_hold_anything(setting: Setting, case: MergeCase) -> None:
    """NaN and infinities in the o of a state with lse -inf change no bit, and their gradients are 0."""
    found = []
    for filler in (0.0, math.nan, math.inf):
        inputs = make_inputs(case, setting.dtype, setting.device)
        dead = 0
        with torch.no_grad():
            for o, lse in zip(inputs.o, inputs.lse, strict=True):
                unseen = lse.transpose(-1, -2) == -math.inf
                o.masked_fill_(unseen[..., None], filler)
                dead += int(unseen.sum())
        assert dead, "no state is unseen: this property could not fail"
        found.append(run(setting, inputs))
        for n, lse in enumerate(inputs.lse):
            unseen = lse == -math.inf
            assert not found[-1][f"dlse{n}"][unseen].any()
            assert not found[-1][f"do{n}"][unseen.transpose(-1, -2)].any()
    for other in found[1:]:
        same_bits(found[0], other)


def rows_without_a_key_are_empty(setting: Setting, case: MergeCase) -> None:
    """(0, -inf) and zero gradients where every lse is -inf, whatever o holds and whatever gradient comes in."""
    inputs = make_inputs(case, setting.dtype, setting.device)
    with torch.no_grad():
        for o, lse in zip(inputs.o, inputs.lse, strict=True):
            o.fill_(math.nan)
            lse.fill_(-math.inf)
        inputs.do.fill_(math.nan)
        inputs.dlse.fill_(math.nan)
    for name, value in run(setting, inputs).items():
        assert bool((value == (-math.inf if name == "lse" else 0.0)).all()), name


def an_empty_state_changes_nothing(setting: Setting, case: MergeCase) -> None:
    """(0, -inf) is the identity: the bits of o and lse stay."""
    inputs = make_inputs(replace(case, unseen=False), setting.dtype, setting.device)
    for o, lse in zip(inputs.o, inputs.lse, strict=True):
        nothing = (torch.zeros_like(o), torch.full_like(lse, -math.inf))
        for pair in (((o, lse), nothing), (nothing, (o, lse)), ((o, lse),)):
            merged, total = tw.merge(*pair, impl=setting.impl)
            assert torch.equal(merged, o)
            assert torch.equal(total, lse)


def infinities_and_nan_show(setting: Setting, case: MergeCase) -> None:
    """Whatever the case: lse +inf gives +inf and o NaN, as softmax does; NaN in lse, or in an o that was seen, reaches
    o.
    """
    o = torch.ones(4, 1, 1, 8, dtype=setting.dtype, device=setting.device)
    lse = torch.tensor([[1.0, 2.0], [math.inf, 2.0], [math.nan, 2.0], [math.nan, math.inf]], device=setting.device)
    states = [(o, lse[:, n].reshape(4, 1, 1)) for n in range(2)]
    merged, total = tw.merge(*states, impl=setting.impl)
    assert bool((merged[0] == 1).all())
    assert bool(merged[1:].isnan().all())
    assert float(total[1]) == math.inf
    assert bool(total[2:].isnan().all())
    broken = torch.full_like(o, math.nan)
    assert bool(tw.merge((broken, states[0][1]), states[1], impl=setting.impl)[0].isnan().all())


def same_bits(one: Results, other: Results) -> None:
    """Equal results, NaN nowhere."""
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs"


Check = Callable[[Setting, MergeCase], None]
_SOME = ("pair", "stacked", "ragged", "three_packed")
PROPERTIES: dict[Check, tuple[str, ...]] = {
    repeats_are_equal: _SOME,
    unseen_states_may_hold_anything: _SOME,
    rows_without_a_key_are_empty: _SOME,
    an_empty_state_changes_nothing: ("pair",),
    infinities_and_nan_show: ("pair",),
}


def property_matrix(settings: Iterable[Setting]) -> list[tuple[Check, Setting, MergeCase]]:
    """Every (property, setting, case); infinities are those of float32, which is what an lse of 16-bit states is."""
    settings = list(settings)
    return [
        (check, setting, BY_NAME[name])
        for check, names in PROPERTIES.items()
        for name in names
        for setting in settings
        if check is not infinities_and_nan_show or setting.dtype != torch.float64
    ]
