"""The calls that `tools.compare_trees` times, by name: attention on the benchmarks' formulas, and steps of a server."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import tilewise as tw
from benchmarks.cases import attention_formula
from benchmarks.cases.few_bits import SCHEMES
from benchmarks.cases.paged import dtype_of, reference, tensors
from benchmarks.cases.serving import encoded_pages, equal, mixed, mixed_problems, sharing
from benchmarks.contenders import inputs
from benchmarks.reference import head_slice, relative_error
from benchmarks.steps import ROWS
from benchmarks.timing import TURN_MS, graphed
from tools.time_rows import prepared

TOKENS, WIDTH = 16_384, 2048  # of all sequences, and of all heads


@dataclass(frozen=True)
class Made:
    """A call to time in turns of `turn_ms`, or call by call, and how far what it returns is from float64 attention."""

    call: Callable[[], Any]
    error: Callable[[Any], float]
    turn_ms: float = 0.0


class Step(NamedTuple):
    """Requests of so many tokens, of which so many are shared, in pages of 16; as codes; with prefixes looked for."""

    requests: int
    tokens: int
    shared: int = 0
    encoding: str | None = None
    looks: bool = False


STEPS = {
    "16x8k": Step(16, 8192),
    "64x4k": Step(64, 4096),
    "128x1k": Step(128, 1024),
    "1x128k": Step(1, 131_072),
    **{kind: Step(64, 4096, encoding=kind) for kind in ("int8", "fp8", "int4")},
    "apart": Step(32, 8192 + 128),
    "shared": Step(32, 8192 + 128, 8192, looks=True),
    "shared-1k": Step(128, 1024 + 64, 1024, looks=True),
    "shared-half": Step(32, 16_384, 8192, looks=True),
    "nothing": Step(64, 4096, looks=True),
    "nothing-1k": Step(128, 1024, looks=True),
}
MIXED = {"mixed": 0, "two-calls": -1}  # which of the case's contenders


@dataclass(frozen=True)
class Problem:
    """Attention on a formula of the benchmarks, forward or backward; `scheme` is one of `few_bits.SCHEMES`."""

    direction: str
    formula: str
    seqlen: int
    head_dim: int
    heads: tuple[int, int] | None = None  # of queries and of keys
    deterministic: bool = False
    scheme: str | None = None


def problem_of(name: str) -> Problem:
    """What a name like b:window:8192:128:deterministic says; a ValueError for one that says nothing."""
    formulas = [formula.part for formula in attention_formula.formulas(64, 1, "cpu")]
    kind = re.fullmatch(rf"([fb]):({'|'.join(formulas)}):(\d+):(\d+)((?::[^:]+)*)", name)
    if kind is None:
        steps, forms = ", ".join([*STEPS, *MIXED]), ", ".join(formulas)
        raise ValueError(f"CALL must be a step ({steps}) or f|b:FORMULA:TOKENS:DIM, FORMULA of {forms}, got {name}")
    direction, formula, seqlen, head_dim, options = kind.groups()
    found = Problem(direction, formula, int(seqlen), int(head_dim))
    for option in options.split(":")[1:]:
        if heads := re.fullmatch(r"(\d+)/(\d+)", option):
            found = replace(found, heads=(int(heads[1]), int(heads[2])))
        elif option == "deterministic":
            found = replace(found, deterministic=True)
        elif option in SCHEMES:
            found = replace(found, scheme=option)
        else:
            known = ", ".join(SCHEMES)
            raise ValueError(f"CALL may have heads (32/8), deterministic or a scheme ({known}) at its end, got {name}")
    return found


def is_step(name: str) -> bool:
    return name in STEPS or name in MIXED


def make(name: str, device: str, quick: bool) -> Made:
    """A call by its name, on random inputs."""
    if not is_step(name):
        return _attention(problem_of(name), device, quick)
    with torch.no_grad():
        call, error = _mixed(name, device, quick) if name in MIXED else _decoding(STEPS[name], device, quick)
        return Made(graphed(call, device), error)


def _attention(problem: Problem, device: str, quick: bool) -> Made:
    seqlen, head_dim = (problem.seqlen, problem.head_dim) if not quick else (max(16, problem.seqlen // 64), 32)
    heads, heads_kv = problem.heads or (WIDTH // problem.head_dim,) * 2
    formulas = attention_formula.formulas(seqlen, heads, device)
    formula = next(formula for formula in formulas if formula.part == problem.formula)
    mask, score = formula.ours
    scheme = None if problem.scheme is None else SCHEMES[problem.scheme]
    batch = max(1, TOKENS // seqlen) if not quick else attention_formula.BATCH
    q, k, v, do = inputs((batch, seqlen, heads, head_dim), dtype_of(device), device, heads_kv=heads_kv)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, mask=mask, score=score, quantize=scheme, deterministic=problem.deterministic)

    def error(found: Any) -> float:
        want = head_slice(q, k, v, do, mask=formula.mask, score=formula.score, batch=0, head=heads - 1)
        parts = {"o": found.detach()} if problem.direction == "f" else dict(zip(("dq", "dk", "dv"), found, strict=True))
        return max(relative_error(x[0, :, -1], getattr(want, part)) for part, x in parts.items())

    return Made(prepared(attention, [q, k, v, do], "fb".index(problem.direction)), error, TURN_MS)


def _decoding(step: Step, device: str, quick: bool) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    batch = equal(quick, (step.requests, step.tokens, step.shared))[0]
    given = tensors(batch, dtype_of(device), device)
    codes = None if step.encoding is None else encoded_pages(given.pool, step.encoding, None)
    k, v = (given.pool[:, 0], given.pool[:, 1]) if codes is None else codes
    layout = sharing(given.layout) if step.looks else given.layout
    some = range(0, len(batch.lengths), -(-len(batch.lengths) // 8))

    def error(o: torch.Tensor) -> float:
        return max(relative_error(o[r, 0], reference(batch, given, r, codes)) for r in some)

    return lambda: tw.attention(given.q, k, v, layout=layout, impl=ROWS[device][0]), error


def _mixed(name: str, device: str, quick: bool) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    (batch,) = mixed_problems(quick)
    contenders, error = mixed(batch, tensors(batch, dtype_of(device), device))
    impl = list(contenders)[MIXED[name]]
    return contenders[impl].step, lambda o: error(impl, o)
