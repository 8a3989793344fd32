"""How far an implementation may be from the truth: twice plain PyTorch's own error at the same dtype, plus a derived
floor.

The floor has three parts, each from what any tiled implementation must do, none tuned:

- order: sums taken in another order in float32 (float64 for float64): `ORDER` units of roundoff of the sum of absolute
values,
  times 1 + the largest score that has any weight, because an error in a score multiplies its weight;
- rounding: half a unit in the last place of the stored result;
- recomputation (gradients): a backward that keeps o and lse reads them rounded, so delta = rowsum(do o) is off by the
rounding of o. It
  is measured: the float64 gradient with o and lse rounded to their dtypes, against the gradient without.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tilewise.testing.case import Case
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.oracles import Dense, gradients, joined, parts

ORDER = 4
FACTOR = 2.0


@dataclass(frozen=True)
class Expectation:
    """True values in float64 and the allowed largest error, by name: o, lse, dq, dk, dv, dsink, dcaptured0, ..."""

    values: dict[str, torch.Tensor]
    allowed: dict[str, float]


def _largest(x: torch.Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


@functools.lru_cache(maxsize=256)
def expectation(case: Case, dtype: torch.dtype, device: str = "cpu") -> Expectation:
    """What `case` must give at `dtype`, and how near."""
    exact = make_inputs(case, dtype, device, exact=True)
    found = parts(exact)
    o, lse = joined(exact, found)
    values = {"o": o, "lse": lse, **gradients(exact, o, lse)}
    floors = _floors(exact, found, values, dtype)
    plain = make_inputs(case, dtype, device)
    plain_o, plain_lse = joined(plain, parts(plain))
    by_hand = {"o": plain_o, "lse": plain_lse, **gradients(plain, plain_o, plain_lse)}
    allowed = {name: FACTOR * error(by_hand[name], value) + floors[name] for name, value in values.items()}
    return Expectation({name: value.detach() for name, value in values.items()}, allowed)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; infinities must agree in place and sign, and count nothing."""
    got, want = got.detach().double(), want.detach().double()
    same = got == want  # also equal infinities
    return _largest(torch.where(same, 0.0, got - want))


def _weighty(one: Dense) -> torch.Tensor:
    """Scores whose weight is more than a millionth: an error in any other is never seen."""
    return one.visible & (one.final - one.lse[..., None] > -14.0)


def _floors(
    inputs: Inputs, found: list[tuple[Dense, slice, slice]], values: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, float]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes, recomputed = _second_look(inputs, found, dtype, wide)
    scores = max((_largest(torch.where(_weighty(one), one.final, 0.0)) for one, _, _ in found), default=0.0)
    stored = {"o": dtype, "dq": dtype, "dk": dtype, "dv": dtype, "lse": wide, "dsink": wide}
    stored |= {f"dcaptured{n}": t.dtype for n, t in enumerate(make_inputs(inputs.case, dtype).captured)}
    floors = {}
    for name, value in values.items():
        finite = torch.where(value.isfinite(), value, 0.0)
        order = ORDER * _unit(wide) * (1.0 + scores) * sizes[name]
        floors[name] = order + _unit(stored[name]) * _largest(finite)
        if name in recomputed:
            floors[name] += error(recomputed[name], value)
    return floors


def _rows(inputs: Inputs, x: torch.Tensor, cut: slice) -> torch.Tensor:
    """The rows of one packed sequence as a batch of one; a dense tensor as it is."""
    return x if inputs.case.packed is None else x[None, cut]


def _into_captured(inputs: Inputs, one: Dense, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(one.final, inputs.captured, weight, **options)


def _second_look(
    inputs: Inputs, found: list[tuple[Dense, slice, slice]], dtype: torch.dtype, wide: torch.dtype
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(largest sum of absolute terms of every result, gradients recomputed in float64 from rounded o and lse)."""
    leaves = inputs.leaves()
    sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}  # of absolute terms
    again = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    sizes = {"o": 0.0, "lse": 1.0}
    case, scale = inputs.case, inputs.q.shape[-1] ** -0.5 if inputs.case.scale is None else inputs.case.scale
    for one, rows, keys in found:
        if not one.o.numel():
            continue
        q, do = (_rows(inputs, x, rows).transpose(1, 2) for x in (inputs.q, inputs.do))
        k, v = (_rows(inputs, x, keys).repeat_interleave(case.group, 2).transpose(1, 2) for x in (inputs.k, inputs.v))
        lse, o = one.lse.to(wide).double(), one.o.to(dtype).double().transpose(1, 2)
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        p = torch.where(one.visible, torch.exp(one.final - lse[..., None]), 0.0)
        dp = torch.matmul(do, v.transpose(-1, -2)) * one.keep
        delta = (do * o).sum(-1, keepdim=True)
        if inputs.dlse is not None:
            dlse = inputs.dlse if case.packed is None else inputs.dlse[None, :, rows]
            delta = delta - dlse.double()[..., None]
        ds, size = p * (dp - delta), p * (dp.abs() + delta.abs())
        slope = torch.ones_like(ds)
        if one.final is not one.raw:
            (slope,) = torch.autograd.grad(one.final.sum(), one.raw, retain_graph=True)
        sizes["o"] = max(sizes["o"], _largest(torch.matmul(p * one.keep, v.abs())))
        sizes["lse"] = max(sizes["lse"], _largest(torch.where(one.lse.isfinite(), one.lse, 0.0)) + 1.0)
        for target, weight, flat in ((again, ds, False), (sums, size, True)):
            size_of = torch.abs if flat else torch.clone
            d_raw = weight * size_of(slope) * abs(scale) if flat else weight * slope * scale
            parts_q = torch.matmul(d_raw, size_of(k)).transpose(1, 2)
            parts_k = torch.matmul(d_raw.transpose(-1, -2), size_of(q)).transpose(1, 2)
            parts_v = torch.matmul((p * one.keep).transpose(-1, -2), size_of(do)).transpose(1, 2)
            for name, part, cut in (("dq", parts_q, rows), ("dk", parts_k, keys), ("dv", parts_v, keys)):
                if name != "dq":
                    part = part.reshape(*part.shape[:2], case.heads_kv, case.group, part.shape[-1]).sum(3)
                _rows(inputs, target[name], cut).add_(part.detach())
            if inputs.sink is not None:
                share = torch.exp(inputs.sink[:, None] - lse) * (size_of(delta[..., 0]))
                target["dsink"] -= share.sum((0, 2)).detach()
            if inputs.captured:
                for n, grad in enumerate(_into_captured(inputs, one, weight)):
                    # The terms' signs are not at hand; those of the scores find sums of the form sum(weight * |s|).
                    signed = _into_captured(inputs, one, weight * one.final.sign())[n] if flat else grad
                    target[f"dcaptured{n}"] += torch.maximum(grad.abs(), signed.abs()) if flat else grad
    return sizes | {name: _largest(value) for name, value in sums.items()}, again
