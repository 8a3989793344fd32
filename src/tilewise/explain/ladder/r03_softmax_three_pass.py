"""Rung 3, safe softmax in three passes: the maximum, then the sum, then the quotient.

softmax(x)_i = exp(x_i) / sum_j exp(x_j) overflows for large x. Subtracting the maximum m changes nothing in exact
arithmetic and keeps every exponent at most 0; but m must be known before the sum, and the sum before the quotient.
Three passes over a row of n numbers: 3·n loads.
"""

from __future__ import annotations

import math

import numpy as np

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory


def run(x: Array) -> tuple[Array, Counts]:
    """Softmax of each row of x (rows, n)."""
    memory = SlowMemory()
    X = memory.put(x)
    rows, n = X.shape
    Y = memory.empty(rows, n)
    for r in range(rows):
        m = -math.inf
        for j in range(n):
            m = max(m, float(X[r, j]))
        total = 0.0
        for j in range(n):
            total += math.exp(X[r, j] - m)
        for j in range(n):
            Y[r, j] = np.exp(X[r, j] - m) / total
    return Y.peek(), memory.counts


def closed_form(rows: int, n: int) -> Counts:
    """Traffic of `run` for x (rows, n)."""
    return Counts(loads=3 * rows * n, stores=rows * n)


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("softmax_three_pass")
