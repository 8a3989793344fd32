"""Runs one case and compares: at most twice plain PyTorch's error at the dtype, plus a floor for rounding."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewise.core.errors import TilewiseError
from tools.fuzz.case import FLOATS, UNIT, Case, Tensors, largest

FACTOR = 2.0
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """`verdict` is ok, refused or failed; `text` says why, and for a refusal `reason` in its first words."""

    verdict: str
    text: str = ""
    reason: str = ""


def judge(build: Callable[[], Case], progress: Progress = lambda stage: None) -> Outcome:
    """Builds a case, runs it and compares; never raises for what the library does. `progress` hears of each stage."""
    text = "while it was built"
    try:
        case = build()
        text = case.text
        before = {name: x.detach().clone() for name, x in case.inputs.items() if name not in case.changed}
        progress("library")
        given = {name: x.detach() for name, x in case.inputs.items()}
        got = _with_gradients(case, _leaves(given, case), case.library)
        again = _with_gradients(case, _leaves(given, case), case.library) if case.repeats else None
        if any(x.is_cuda for x in got.values()):
            torch.cuda.synchronize()
    except TilewiseError as refusal:
        return Outcome("refused", f"{refusal} :: {text}", reason_of(refusal))
    except torch.OutOfMemoryError:
        return Outcome("refused", text, "out of memory")
    except Exception as error:
        return Outcome("failed", f"raised {_told(error)} :: {text}")
    progress("comparison")
    found = [f"{name} was changed" for name, x in before.items() if not _same_bits(x, given[name])]
    if again is not None:
        found += [f"{name} has other bits at a repeat" for name, x in got.items() if not _same_bits(x, again[name])]
    try:
        found += compare(case, got)
    except Exception as error:  # a fault of these tools, or results that cannot be compared
        found.append(f"comparing raised {_told(error)}")
    return Outcome("failed", f"{'; '.join(found)} :: {text}") if found else Outcome("ok")


def _told(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({'/'.join(place.filename.split('/')[-3:])}:{place.lineno})"


def reason_of(refusal: TilewiseError) -> str:
    """What refusals of one kind have in common: the argument, and the first words of what was expected."""
    parts = []
    for text, most in ((refusal.name, 5), (refusal.expected, 8)):
        words = text.replace("(", " (").split()[:most]
        parts.append(" ".join("#" if any(letter.isdigit() for letter in word) else word for word in words))
    return f"{type(refusal).__name__} {': '.join(parts)}"


def compare(case: Case, got: Tensors) -> list[str]:
    """What is wrong with the results, one text for each."""
    as_double = {name: x.double() if x.dtype in FLOATS else x for name, x in case.inputs.items()}
    truth = _with_gradients(case, _leaves(as_double, case), case.plain)
    roughly = case.rough or case.plain
    peer = truth if case.dtype == torch.float64 else _with_gradients(case, _leaves(dict(case.inputs), case), roughly)
    found = [f"{name} is missing" for name in truth if name not in got]
    for name, x in got.items():
        problem = _problem(case, name, x.detach().double(), truth, peer)
        if problem:
            found.append(f"{name} {problem}")
    return found


def _problem(case: Case, name: str, x: torch.Tensor, truth: Tensors, peer: Tensors) -> str:
    want, by_hand = truth[name].detach().double(), peer[name].detach().double()
    if x.shape != want.shape:
        return f"has shape {tuple(x.shape)} for {tuple(want.shape)}"
    agree = (x == want) | (x.isfinite() & want.isfinite()) | (x.isnan() & want.isnan())
    if not bool(agree.all()):
        place = tuple((~agree).nonzero()[0].tolist())
        return f"at {list(place)} is {float(x[place]):.4g} for {float(want[place]):.4g}, {int((~agree).sum())} such"
    error, allowed = _distance(x, want), 0.0
    if name not in case.exact:
        allowed = FACTOR * _distance(by_hand, want) + common_floor(case, name, want) + case.floor(name, truth)
    if error <= allowed:
        return ""
    return f"is off by {error:.3g}, allowed {allowed:.3g} (largest {largest(want):.3g})"


def common_floor(case: Case, name: str, want: torch.Tensor) -> float:
    """One rounding of the result where it is stored, and the order of its longest sum."""
    size = largest(want)
    stored = case.wide if name == "lse" else case.dtype
    if name.startswith("d") and name[1:] in case.inputs:
        stored = max(stored, case.inputs[name[1:]].dtype, key=lambda dtype: UNIT.get(dtype, 0.0))
    return 4 * UNIT[stored] * size + 128 * UNIT[case.wide] * math.sqrt(case.terms) * (1 + size)


def _distance(x: torch.Tensor, want: torch.Tensor) -> float:
    both = x.isfinite() & want.isfinite()
    return largest(torch.where(both, x - want, 0.0))


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    if not x.dtype.is_floating_point:
        return torch.equal(x, y)
    return torch.equal(x.double().nan_to_num(nan=0.5), y.detach().double().nan_to_num(nan=0.5))


def _leaves(inputs: Tensors, case: Case) -> Tensors:
    """The inputs, of which leaves take gradients; the others, and what is written, as they are."""
    found = {name: x.detach().clone() if name in case.changed else x.detach() for name, x in inputs.items()}
    return {name: x.requires_grad_() if name in case.leaves else x for name, x in found.items()}


def _with_gradients(case: Case, inputs: Tensors, run: Callable[[Tensors], Tensors]) -> Tensors:
    """The results of `run`, and the gradients of leaves for incoming ones that the case's numbers decide."""
    if not case.leaves:
        with torch.no_grad():
            return run(inputs)
    results = run(inputs)
    incoming = []
    for number, name in enumerate(case.into):
        x = results[name]
        generator = torch.Generator().manual_seed(number + 17)
        drawn = torch.randn(x.shape, generator=generator).to(case.wide if name == "lse" else case.dtype)
        incoming.append(drawn.to(x.device, x.dtype))
    pairs = [(results[name], g) for name, g in zip(case.into, incoming, strict=True) if results[name].requires_grad]
    leaves = [inputs[name] for name in case.leaves]
    if pairs:
        outputs, given = [x for x, _ in pairs], [g for _, g in pairs]
        gradients = torch.autograd.grad(outputs, leaves, given, allow_unused=True, materialize_grads=True)
    else:
        gradients = tuple(torch.zeros_like(x) for x in leaves)
    return results | {f"d{name}": g for name, g in zip(case.leaves, gradients, strict=True)}
