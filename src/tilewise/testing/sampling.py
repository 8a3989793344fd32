"""Calls of `sample` with every combination of what it takes, and what the specification makes of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.sampling.problem import Call, make_call
from tilewise.ops.sampling.table import SAMPLE

TEMPERATURES = ("none", "greedy", "mixed", "number")
TRUNCATIONS = ("none", "top_k", "top_p", "min_p", "top_k top_p", "top_p min_p", "top_k top_p min_p")
PENALTIES = ("none", "repetition", "presence frequency", "repetition presence frequency")
ALLOWED = ("none", "rows", "masks")
LISTS = ("none", "raw 0", "raw 3", "processed 20", "processed none")


@dataclass(frozen=True)
class SamplingCase:
    """Which arguments a call has; rows of requests that are out of order, tokens that a shard does not have."""

    temperature: str = "mixed"
    truncation: str = "none"
    penalties: str = "none"
    bias: bool = False
    allowed: str = "none"
    lists: str = "none"
    first_token: int = 0
    rows: int = 5
    width: int = 203


FACTORS: dict[str, tuple[Any, ...]] = {
    "temperature": TEMPERATURES,
    "truncation": TRUNCATIONS,
    "penalties": PENALTIES,
    "bias": (False, True),
    "allowed": ALLOWED,
    "lists": LISTS,
    "first_token": (0, 6),
}


def _covering() -> list[SamplingCase]:
    """Cases in which every two values of two factors meet: of some with a pair that is missing always the best one."""
    draw = random.Random(0)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    found = []
    while missing:
        pair = dict(min(missing, key=repr))
        some = [{name: pair.get(name, draw.choice(values)) for name, values in FACTORS.items()} for _ in range(20)]
        best = max(some, key=lambda one: len(missing.intersection(itertools.combinations(one.items(), 2))))
        missing.difference_update(itertools.combinations(best.items(), 2))
        found.append(SamplingCase(**best))
    return found


CASES = _covering()


def make_arguments(case: SamplingCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The arguments of `sample`."""
    generator = torch.Generator().manual_seed(seed)
    rows, width, first = case.rows, case.width, case.first_token

    def uniform(low: float, high: float) -> torch.Tensor:
        return (low + (high - low) * torch.rand(rows, generator=generator)).to(device)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    logits = 3.0 * torch.randn(rows, width, generator=generator)
    logits[:, ::3] = logits[:, ::3].round()  # equal ones
    logits[0, ::5] = -torch.inf
    found: dict[str, Any] = {"logits": logits.to(device, dtype), "first_token": first}
    found["seeds"] = integers(-(2**62), 2**62, rows).to(device)
    found["positions"] = integers(0, 2**31 - 1, rows).to(device, torch.int32)
    mixed = torch.where(torch.arange(rows, device=device) % 3 == 1, 0.0, uniform(0.3, 2.0))
    found["temperature"] = {"none": None, "greedy": 0, "mixed": mixed, "number": 0.8}[case.temperature]
    kept = case.truncation.split()
    if "top_k" in kept:
        k = torch.tensor([7, 0, 1, width + 5, 40]).repeat(-(-rows // 5))[:rows]
        found["top_k"] = k.to(device, torch.int32)
    if "top_p" in kept:
        found["top_p"] = torch.tensor([0.9, 0.5, 1.0, 0.0, 0.97]).repeat(-(-rows // 5))[:rows].to(device)
    if "min_p" in kept:
        found["min_p"] = torch.tensor([0.0, 0.1, 0.02, 1.0, 0.3]).repeat(-(-rows // 5))[:rows].to(device)
    if case.penalties != "none":
        requests, most = rows + 2, 29
        history = integers(first - 4, first + width // 8, requests, most).to(torch.int32)
        lengths = integers(0, most + 1, requests)
        named = case.penalties.split()
        found["penalties"] = tw.Penalties(
            history.to(device),
            (lengths // 2).to(device, torch.int32),
            lengths.to(device, torch.int32),
            torch.randperm(requests, generator=generator)[:rows].to(device, torch.int32),
            repetition=uniform(0.8, 1.6) if "repetition" in named else None,
            presence=uniform(-0.5, 1.0) if "presence" in named else None,
            frequency=0.3 if "frequency" in named else None,
        )
    if case.bias:
        tokens = torch.rand(rows, width, generator=generator).argsort(1)[:, :9] + first
        tokens[:, 7] = -1
        tokens[1] = -1
        values = 4.0 * torch.randn(rows, 9, generator=generator)
        values[:, :3] = -torch.inf
        found["bias"] = (tokens.to(device, torch.int32), values.to(device))
    if case.allowed != "none":
        bits = integers(-(2**31), 2**31, rows, -(-width // 32)).to(torch.int32)
        of = integers(-1, rows, rows).to(device, torch.int32)
        found["allowed"] = bits.to(device) if case.allowed == "rows" else (bits.to(device), of)
    if case.lists != "none":
        found["logprobs_of"], count = case.lists.split()
        found["logprobs"] = None if count == "none" else int(count)
    return found


def call_of(arguments: dict[str, Any]) -> Call:
    """The call that `sample` makes of these."""
    by_row = {name: arguments.get(name) for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")}
    penalties, bias, allowed = (arguments.get(name) for name in ("penalties", "bias", "allowed"))
    first_token, of = arguments.get("first_token", 0), arguments.get("logprobs_of", "raw")
    return make_call(arguments["logits"], penalties, bias, allowed, by_row, first_token, arguments.get("logprobs"), of)


def check(arguments: dict[str, Any], impl: str) -> None:
    """As the specification has it; where values are equal to some bits, another token may be taken."""
    call = call_of(arguments)
    found, wanted = (tw.Sampled(*SAMPLE(call, name)) for name in (impl, "reference"))
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-5, atol=1e-5, equal_nan=True)
    same = found.tokens == wanted.tokens
    assert int((~same).sum()) <= len(same) // 100, (found.tokens, wanted.tokens)
    torch.testing.assert_close(found.logprobs[same], wanted.logprobs[same], rtol=1e-5, atol=2e-5, equal_nan=True)
    if call.top >= 0:
        assert found.top_tokens is not None
        assert wanted.top_tokens is not None
        assert found.top_logprobs is not None
        assert wanted.top_logprobs is not None
        assert torch.equal(found.top_tokens, wanted.top_tokens)
        torch.testing.assert_close(found.top_logprobs, wanted.top_logprobs, rtol=1e-5, atol=2e-5, equal_nan=True)


def check_far_logits(offset: float, impl: str, device: str = "cpu") -> None:
    """Log-probabilities of logits that all have a large number added, which none depends on."""
    logits = torch.zeros(3, 700)
    logits[:, 5] = 1e-3 * abs(offset)
    arguments = {"logits": (logits + offset).to(device), "temperature": 0.0, "logprobs": 3}
    check(arguments, impl)
    arguments["logits"] = torch.full((3, 700), offset, device=device)
    check(arguments, impl)


def _variant(case: SamplingCase) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        sized = SamplingCase(**{**vars(case), "width": width, "rows": 8})
        return SAMPLE, call_of(make_arguments(sized, dtype))

    return make


VARIANTS = {
    "greedy": _variant(SamplingCase("greedy")),
    "plain": _variant(SamplingCase("mixed")),
    "penalties": _variant(
        SamplingCase("mixed", "none", "repetition presence frequency", False, "masks", "processed 0")
    ),
    "all": _variant(SamplingCase("mixed", "top_k top_p min_p", "repetition presence frequency", True, "rows", "raw 3")),
}
