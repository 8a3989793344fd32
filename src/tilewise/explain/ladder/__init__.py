"""The ladder: ten small programs that climb from a naive matrix product to split-KV decoding, counting their traffic.

Each rung is one file, `run(...)` with a counting slow memory and `closed_form(...)` with the formula its counts obey.
`python -m tilewise.explain.ladder` climbs them all; `python -m tilewise.explain.ladder.r09_flash_attention_2` shows
one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain.ladder.slow_memory import Array, Counts

ORDER: tuple[str, ...] = (
    "matmul_naive",
    "matmul_tiled",
    "softmax_three_pass",
    "softmax_online",
    "attention_materialised",
    "attention_two_pass",
    "attention_one_pass",
    "flash_attention_1",
    "flash_attention_2",
    "split_kv",
)


@dataclass(frozen=True)
class Report:
    """One rung, run: the problem, counted and predicted traffic, and the largest error against float64 NumPy."""

    rung: str
    title: str
    problem: str
    counts: Counts
    formula: Counts
    error: float

    def __str__(self) -> str:
        verdict = "as the formula says" if self.counts == self.formula else f"the formula says {self.formula}"
        return (
            f"{self.rung}: {self.title}\n"
            f"  {self.problem}\n"
            f"  loads {self.counts.loads:,}, stores {self.counts.stores:,} elements ({verdict})\n"
            f"  largest error against NumPy {self.error:.1e}"
        )


def rung(name: str) -> Any:
    """The module of a rung (its `run`, `closed_form` and text), by its name in ORDER; InputError for another name."""
    if name not in ORDER:
        raise InputError("rung", got=name, expected=f"one of: {', '.join(ORDER)}")
    return importlib.import_module(f"{__name__}.r{ORDER.index(name) + 1:02d}_{name}")


def softmax(x: Array) -> Array:
    """Softmax over the last axis, in float64: what rungs 3 and 4 must equal."""
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(p / p.sum(axis=-1, keepdims=True))


def attention(q: Array, k: Array, v: Array) -> Array:
    """Attention with every matrix held, in float64: what rungs 5 to 10 must equal."""
    return np.asarray(softmax(q.shape[1] ** -0.5 * q @ k.T) @ v)


def climb(name: str, *, size: int = 32, head_dim: int = 8, seed: int = 0, **options: Any) -> Report:
    """Run one rung on random numbers and compare its counts and result with the formula and with NumPy.

    Args:
        name: a name in ORDER.
        size: side of the matrices, length of the softmax rows, or tokens (queries and keys; split_kv has one query).
        head_dim: width of q, k and v for the attention rungs.
        seed: of the random numbers.
        options: passed to the rung: `tile`, `fast_memory`, `block_m`, `block_n`, `splits`.
    """
    if size < 1 or head_dim < 1:
        raise InputError("size, head_dim", got=(size, head_dim), expected="integers of at least 1")
    module, random = rung(name), np.random.default_rng(seed)
    inputs: Sequence[Array]
    sizes: tuple[int, ...]
    expected: Callable[..., Array]
    if name.startswith("matmul"):
        inputs, sizes, expected = list(random.standard_normal((2, size, size))), (size, size, size), np.matmul
        problem = f"{size} × {size} times {size} × {size}"
    elif name.startswith("softmax"):
        inputs, sizes, expected = [random.standard_normal((size, size))], (size, size), softmax
        problem = f"{size} rows of {size}"
    else:
        seqlen_q = 1 if name == "split_kv" else size
        inputs = [random.standard_normal((rows, head_dim)) for rows in (seqlen_q, size, size)]
        sizes, expected = (seqlen_q, size, head_dim, head_dim), attention
        problem = f"{seqlen_q} quer{'y' if seqlen_q == 1 else 'ies'}, {size} keys, head_dim {head_dim}"
    result, counts = module.run(*inputs, **options)
    problem += "".join(f", {option} {value}" for option, value in options.items())
    title = module.__doc__.splitlines()[0].split(", ", 1)[1].rstrip(".")
    error = float(np.abs(result - expected(*inputs)).max())
    return Report(name, title, problem, counts, module.closed_form(*sizes, **options), error)


def show(name: str) -> None:
    """Print one rung's report at the default size."""
    print(climb(name))
