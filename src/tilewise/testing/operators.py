"""What must hold of every implementation of an operation on rows of numbers, on any device, else AssertionError.

The truth is the same formula in PyTorch at float64, gradients by autograd. Budgets are those of
`tilewise.testing.budgets`: twice plain PyTorch's error at the same dtype, plus a floor for sums in another order and
for the rounding of what is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise.testing.budgets import FACTOR, ORDER, error

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
Results = dict[str, torch.Tensor]
LEAST = 1e-300  # what a largest result of 0 counts as, so that terms have a ratio to it


def results(function: Function, inputs: dict[str, torch.Tensor], seed: int = 0) -> Results:
    """Outputs ("out0", ...) and, for random gradients of these, the gradient of every input that takes one ("dx")."""
    leaves = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    found = function(**leaves)
    outputs = (found,) if isinstance(found, torch.Tensor) else found
    named = {f"out{n}": out.detach() for n, out in enumerate(outputs)}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    if wanted:
        generator = torch.Generator().manual_seed(seed)
        # drawn alike for every dtype and device
        incoming = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outputs]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), incoming)
        named |= {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return named


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def check(
    ours: Function,
    plain: Function,
    inputs: dict[str, torch.Tensor],
    terms: dict[str, float] | None = None,
    kept: dict[str, float] | None = None,
) -> None:
    """`ours` is as near to the truth as it must be.

    Args:
        ours: takes `inputs` by name.
        plain: the same in PyTorch, at any dtype.
        inputs: those that take gradients have `requires_grad`.
        terms: for results that are sums, by name, how much larger the sum of the terms' absolute values is than the
            largest result; 1 where not named.
        kept: by name, how far off a result may be since what it is made of was kept in fewer bits.
    """
    truth = results(plain, {name: _exact(x) for name, x in inputs.items()})
    by_hand, got = results(plain, inputs), results(ours, inputs)
    assert got.keys() == truth.keys()
    for name, value in truth.items():
        assert got[name].shape == value.shape, f"{name}: shape {tuple(got[name].shape)}, not {tuple(value.shape)}"
        assert got[name].dtype == by_hand[name].dtype, f"{name}: {got[name].dtype}, not {by_hand[name].dtype}"
        assert torch.equal(got[name].isnan(), value.isnan()), f"{name}: NaN elsewhere"
        off = error(got[name].nan_to_num(nan=0.0), value.nan_to_num(nan=0.0))
        allowed = FACTOR * error(by_hand[name].nan_to_num(nan=0.0), value.nan_to_num(nan=0.0))
        allowed += _floor(value, by_hand[name].dtype, (terms or {}).get(name, 1.0)) + (kept or {}).get(name, 0.0)
        assert off <= allowed, f"{name}: off by {off:.3g}, allowed {allowed:.3g}"


def _floor(value: torch.Tensor, dtype: torch.dtype, terms: float) -> float:
    finite = torch.where(value.isfinite(), value, 0.0)
    largest = max(float(finite.abs().max()) if finite.numel() else 0.0, LEAST)
    wide = torch.promote_types(dtype, torch.float32)
    return largest * (torch.finfo(dtype).eps / 2 + ORDER * terms * torch.finfo(wide).eps / 2)


def poisoned(function: Function, inputs: dict[str, torch.Tensor], name: str, row: int) -> None:
    """NaN in one row of an input makes that row of the outputs NaN, and no other."""
    bad = dict(inputs)
    bad[name] = bad[name].detach().clone()
    bad[name].flatten(0, -2)[row].fill_(torch.nan)
    clean, got = (results(function, {k: x.detach() for k, x in values.items()}) for values in (inputs, bad))
    for key, value in got.items():
        found, before = value.flatten(0, -2), clean[key].flatten(0, -2)
        assert found[row].isnan().all(), f"{key}: NaN is lost"
        others = [n for n in range(found.shape[0]) if n != row]
        assert torch.equal(found[others], before[others]), f"{key}: NaN spreads to other rows"
