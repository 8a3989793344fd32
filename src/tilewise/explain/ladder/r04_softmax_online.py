"""Rung 4, online softmax in two passes: maximum and sum found together (Milakov and Gimelshein, 2018).

Keep m, the largest number seen so far, and l = sum of exp(x_j - m) over those seen. When a new maximum m' arrives,
every old term was too large by exp(m - m'): scale l once and go on. The final m and l are the same as those of three
passes, so one pass disappears: 2·n loads a row.
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
        m, l = -math.inf, 0.0
        for j in range(n):
            x_j = float(X[r, j])
            m_new = max(m, x_j)
            l = l * math.exp(m - m_new) + math.exp(x_j - m_new)
            m = m_new
        for j in range(n):
            Y[r, j] = np.exp(X[r, j] - m) / l
    return Y.peek(), memory.counts


def closed_form(rows: int, n: int) -> Counts:
    """Traffic of `run` for x (rows, n)."""
    return Counts(loads=2 * rows * n, stores=rows * n)


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("softmax_online")
