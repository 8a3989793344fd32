"""How far an implementation may be from the truth.

Twice plain PyTorch's own error at the same dtype, plus a derived floor. The floor has three parts, each from what any
tiled implementation must do, none tuned:

- order: sums taken in another order in float32 (float64 for float64): `ORDER` units of roundoff of the sum of absolute
  values, times 1 + the largest score that has any weight, because an error in a score multiplies its weight;
- rounding: half a unit in the last place of the stored result;
- recomputation (gradients): a backward that keeps o and lse reads them as the forward rounded them, so
  delta = rowsum(dO * O) is off by the error of o. It is measured: the float64 gradient with o off by the rounding of
  its weights and of itself, drawn at random `DRAWS` times, and lse rounded, against the gradient without.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from tilewise.quant import decode, encode
from tilewise.testing.case import Case
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.oracles import Dense, gradients, joined, parts
from tilewise.testing.paging import read_by_channel

ORDER = 4
DRAWS = 4
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
    return expected(make_inputs(case, dtype, device, exact=True), make_inputs(case, dtype, device), dtype)


@functools.lru_cache(maxsize=256)
def encoded_expectation(
    case: Case, dtype: torch.dtype, kind: str, device: str = "cpu", by_channel: tuple[int, int] | None = None
) -> Expectation:
    """What `case` must give where keys and values are what their codes stand for; keys by channel, with (page size,
    bits) of theirs.
    """
    exact, plain = make_inputs(case, dtype, device, exact=True), make_inputs(case, dtype, device)
    k, v = (decode(encode(x, kind)) for x in (plain.k, plain.v))
    if by_channel is not None:
        k = read_by_channel(plain.k, [n for _, n in case.lengths], *by_channel)
    exact, plain = (
        replace(x, k=k.to(x.k.dtype, copy=True).requires_grad_(), v=v.to(x.v.dtype, copy=True).requires_grad_())
        for x in (exact, plain)
    )
    return expected(exact, plain, dtype)


def fp8_products(want: Expectation, case: Case, dtype: torch.dtype, device: str = "cpu") -> Expectation:
    """`want` for scores that are products of fp8: in each step of 32 dimensions, terms keep 14 bits of the largest
    (DeepSeek-AI, "DeepSeek-V3", 2024, section 3.3.2). What scores are off by, lse is, and o twice as much of the sum of
    absolute values.
    """
    plain = make_inputs(case, dtype, device, exact=True)
    q, k = (x.detach().double().abs().flatten(0, -3) for x in (plain.q, plain.k))  # (rows, heads, dim)
    q = q.reshape(len(q), case.heads_kv, -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)
    terms = _largest(q @ k.permute(1, 2, 0))
    scale = q.shape[-1] ** -0.5 if case.scale is None else abs(case.scale)
    off = -(-q.shape[-1] // 32) * 2.0**-14 * scale * terms
    sizes = replace(plain, v=plain.v.detach().abs())
    o, _lse = joined(sizes, parts(sizes))
    more = {"o": 2 * off * _largest(o), "lse": off}
    return Expectation(want.values, {name: allowed + more.get(name, 0.0) for name, allowed in want.allowed.items()})


def expected(exact: Inputs, plain: Inputs, dtype: torch.dtype) -> Expectation:
    """What inputs in float64 must give at `dtype`, and how near, from what plain PyTorch makes of them there."""
    found = parts(exact)
    o, lse = joined(exact, found)
    values = {"o": o, "lse": lse, **gradients(exact, o, lse)}
    floors = _floors(exact, found, values, dtype)
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
        floors[name] += max((error(again[name], value) for again in recomputed if name in again), default=0.0)
    return floors


def _rows(inputs: Inputs, x: torch.Tensor, cut: slice) -> torch.Tensor:
    """The rows of one packed sequence as a batch of one; a dense tensor as it is."""
    return x if inputs.case.packed is None else x[None, cut]


def _into_captured(inputs: Inputs, one: Dense, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(one.final, inputs.captured, weight, **options)


def _second_look(
    inputs: Inputs, found: list[tuple[Dense, slice, slice]], dtype: torch.dtype, wide: torch.dtype
) -> tuple[dict[str, float], list[dict[str, torch.Tensor]]]:
    """(largest sum of absolute terms of every result, gradients recomputed in float64 from draws of o and from lse)."""
    leaves = inputs.leaves()
    sums, *again = ({name: torch.zeros_like(leaf) for name, leaf in leaves.items()} for _ in range(1 + DRAWS))
    sizes = {"o": 0.0, "lse": 1.0}
    noise = torch.Generator(inputs.q.device).manual_seed(0)
    for one, rows, keys in found:
        if not one.o.numel():
            continue
        look = _Look(inputs, one, rows, keys, wide)
        sizes["o"] = max(sizes["o"], _largest(look.size_o))
        sizes["lse"] = max(sizes["lse"], _largest(torch.where(one.lse.isfinite(), one.lse, 0.0)) + 1.0)
        exact = one.o.double().transpose(1, 2)
        look.add(sums, exact, absolute=True)
        for target in again:
            drawn = torch.rand(exact.shape, generator=noise, device=exact.device, dtype=exact.dtype) * 2.0 - 1.0
            look.add(target, (exact + drawn * _unit(dtype) * look.size_o).to(dtype).double(), absolute=False)
    return sizes | {name: _largest(value) for name, value in sums.items()}, again


class _Look:
    """The gradients of one sequence in float64, from its lse rounded to `wide` and any o."""

    def __init__(self, inputs: Inputs, one: Dense, rows: slice, keys: slice, wide: torch.dtype) -> None:
        self.inputs, self.one, self.cuts = inputs, one, (rows, keys)
        case = inputs.case
        self.scale = inputs.q.shape[-1] ** -0.5 if case.scale is None else case.scale
        self.q, self.do = (_rows(inputs, x, rows).transpose(1, 2) for x in (inputs.q, inputs.do))
        self.k, self.v = (
            _rows(inputs, x, keys).repeat_interleave(case.group, 2).transpose(1, 2) for x in (inputs.k, inputs.v)
        )
        lse = one.lse.to(wide).double()
        self.lse = torch.where(lse == -torch.inf, torch.inf, lse)
        self.p = torch.where(one.visible, torch.exp(one.final - self.lse[..., None]), 0.0)
        self.dp = torch.matmul(self.do, self.v.transpose(-1, -2)) * one.keep
        self.slope = torch.ones_like(self.p)
        if one.final is not one.raw:
            (self.slope,) = torch.autograd.grad(one.final.sum(), one.raw, retain_graph=True)
        self.size_o = torch.matmul(self.p * one.keep, self.v.abs()).detach()

    def add(self, target: dict[str, torch.Tensor], o: torch.Tensor, absolute: bool) -> None:
        """Add every gradient for this o to `target`; with `absolute`, the sums of their terms' absolute values."""
        inputs, case, (rows, keys) = self.inputs, self.inputs.case, self.cuts
        size_of = torch.abs if absolute else torch.clone
        delta = (self.do * o).sum(-1, keepdim=True)
        if inputs.dlse is not None:
            dlse = inputs.dlse if case.packed is None else inputs.dlse[None, :, rows]
            delta = delta - dlse.double()[..., None]
        ds = self.p * (self.dp.abs() + delta.abs() if absolute else self.dp - delta)
        d_raw = ds * size_of(self.slope) * (abs(self.scale) if absolute else self.scale)
        parts_q = torch.matmul(d_raw, size_of(self.k)).transpose(1, 2)
        parts_k = torch.matmul(d_raw.transpose(-1, -2), size_of(self.q)).transpose(1, 2)
        parts_v = torch.matmul((self.p * self.one.keep).transpose(-1, -2), size_of(self.do)).transpose(1, 2)
        for name, part, cut in (("dq", parts_q, rows), ("dk", parts_k, keys), ("dv", parts_v, keys)):
            if name != "dq":
                part = part.reshape(*part.shape[:2], case.heads_kv, case.group, part.shape[-1]).sum(3)
            _rows(inputs, target[name], cut).add_(part.detach())
        if inputs.sink is not None:
            share = torch.exp(inputs.sink[:, None] - self.lse) * size_of(delta[..., 0])
            target["dsink"] -= share.sum((0, 2)).detach()
        if inputs.captured:
            grads = _into_captured(inputs, self.one, ds)
            if absolute:
                # The terms' signs are not at hand; those of the scores find sums of the form sum(weight * |s|).
                signed = _into_captured(inputs, self.one, ds * self.one.final.sign())
                grads = tuple(torch.maximum(g.abs(), s.abs()) for g, s in zip(grads, signed, strict=True))
            for n, grad in enumerate(grads):
                target[f"dcaptured{n}"] += grad
