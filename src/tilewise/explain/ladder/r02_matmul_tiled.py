"""Rung 2, matrix multiplication by tiles: fetch a t × t tile of each factor once, use every element t times.

Fast memory now holds three tiles (3·t² elements). Each tile of C still needs a whole strip of A and of B, but an
element fetched serves t products instead of one, so the loads fall by t: from 2·m·n·k to 2·m·n·k / t. For 32 × 32
matrices and t = 16, from 65,536 to 4,096. (More fast memory, larger t, less traffic: that is the whole game.)
"""

from __future__ import annotations

import numpy as np

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory, ceil_div, positive


def run(a: Array, b: Array, *, tile: int = 16) -> tuple[Array, Counts]:
    """a (m, k) times b (k, n) -> (m, n) in square tiles; the edges may be ragged."""
    positive(tile=tile)
    memory = SlowMemory()
    A, B = memory.put(a), memory.put(b)
    (m, depth), n = A.shape, B.shape[1]
    C = memory.empty(m, n)
    for i in range(0, m, tile):
        rows = np.s_[i : i + tile]
        for j in range(0, n, tile):
            cols = np.s_[j : j + tile]
            acc = np.zeros((min(tile, m - i), min(tile, n - j)))
            for k in range(0, depth, tile):
                acc += A[rows, k : k + tile] @ B[k : k + tile, cols]
            C[rows, cols] = acc
    return C.peek(), memory.counts


def closed_form(m: int, n: int, k: int, *, tile: int = 16) -> Counts:
    """Traffic of `run`: A once for every column of tiles, B once for every row of tiles."""
    return Counts(loads=m * k * ceil_div(n, tile) + k * n * ceil_div(m, tile), stores=m * n)


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("matmul_tiled")
