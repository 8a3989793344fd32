"""The ladder: ten small programs that climb from a naive matrix product to split-KV decoding, counting their traffic.

Each rung is one file, `run(...)` with a counting slow memory and `closed_form(...)` with the formula its counts obey.
`python -m tilewise.explain.ladder` climbs them all; `python -m tilewise.explain.ladder.r09_flash_attention_2` shows
one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    options: tuple[tuple[str, Any], ...]
    counts: Counts
    formula: Counts
    error: float

    @property
    def label(self) -> str:
        """The rung and its options in words, as "flash attention 2, causal"."""
        options = (f", {name}" if value is True else f", {name} {value}" for name, value in self.options)
        return (self.rung.replace("_", " ") + "".join(options)).replace("flash attention ", "FlashAttention-")

    def __str__(self) -> str:
        verdict = "as the formula says" if self.counts == self.formula else f"the formula says {self.formula}"
        return (
            f"{self.rung}: {self.title}\n"
            f"  {self.problem}{''.join(f', {name} {value}' for name, value in self.options)}\n"
            f"  loads {self.counts.loads:,}, stores {self.counts.stores:,} elements ({verdict})\n"
            f"  largest error against NumPy {self.error:.1e}"
        )


def rung(name: str) -> Any:
    """The module of a rung, with its functions `run` and `closed_form`.

    Args:
        name: a name in ORDER.

    Returns:
        The module.

    Raises:
        InputError: an unknown name.

    Example:
        >>> from tilewise.explain.ladder import rung
        >>> rung("matmul_naive").closed_form(32, 32, 32)
        Counts(loads=65536, stores=1024)
    """
    if name not in ORDER:
        hint = "tilewise explain lists them"
        raise InputError("rung", got=name, expected=f"one of: {', '.join(ORDER)}", hint=hint)
    return importlib.import_module(f"{__name__}.r{ORDER.index(name) + 1:02d}_{name}")


def softmax(x: Array) -> Array:
    """Softmax over the last axis, in float64: what rungs 3 and 4 must equal."""
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(p / p.sum(axis=-1, keepdims=True))


def attention(q: Array, k: Array, v: Array, *, causal: bool = False) -> Array:
    """Attention with every matrix held, in float64: what rungs 5 to 10 must equal. Rows that see no key give 0."""
    s = q.shape[1] ** -0.5 * q @ k.T
    if causal:
        s = np.where(np.tri(len(q), len(k), len(k) - len(q)) > 0, s, -np.inf)
    some = ~np.isneginf(s).all(axis=-1)
    o = np.zeros((len(q), v.shape[1]))
    o[some] = softmax(s[some]) @ v
    return o


def climb(name: str, *, size: int = 32, head_dim: int = 8, seed: int = 0, **options: Any) -> Report:
    """Run one rung on random numbers and compare its counts and result with the formula and with NumPy.

    Args:
        name: a name in ORDER.
        size: side of the matrices, length of the softmax rows, or tokens (queries and keys; split_kv has one query).
        head_dim: width of q, k and v for the attention rungs.
        seed: of the random numbers.
        options: passed to the rung: `tile`, `fast_memory`, `block_m`, `block_n`, `causal`, `splits`.

    Returns:
        A `Report`: the problem, counted and predicted traffic, and the largest error.

    Raises:
        InputError: an unknown name, or a size below 1.

    Example:
        >>> from tilewise.explain.ladder import climb
        >>> climb("matmul_tiled", size=32, tile=16).counts
        Counts(loads=4096, stores=1024)
    """
    if size < 1 or head_dim < 1:
        hint = "leave them out for 32 and 8"
        raise InputError("size, head_dim", got=(size, head_dim), expected="integers of at least 1", hint=hint)
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
        sizes, expected = (seqlen_q, size, head_dim, head_dim), partial(attention, causal=options.get("causal", False))
        problem = f"{seqlen_q} quer{'y' if seqlen_q == 1 else 'ies'}, {size} keys, head_dim {head_dim}"
    result, counts = module.run(*inputs, **options)
    title = module.__doc__.splitlines()[0].split(", ", 1)[1].rstrip(".")
    error = float(np.abs(result - expected(*inputs)).max())
    return Report(name, title, problem, tuple(options.items()), counts, module.closed_form(*sizes, **options), error)


def show(name: str) -> None:
    """Print one rung's report at the default size."""
    print(climb(name))
