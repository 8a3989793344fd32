"""Rung 1, matrix multiplication as it is defined: every product fetches both its factors from slow memory.

C[i, j] = sum over k of A[i, k] B[k, j] needs m·n·k products. With no fast memory to keep anything in, that is 2·m·n·k
loads: each element of A is fetched n times and each of B m times. The rest of the ladder is about not doing that.
"""

from __future__ import annotations

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory


def run(a: Array, b: Array) -> tuple[Array, Counts]:
    """a (m, k) times b (k, n) -> (m, n), one product at a time."""
    memory = SlowMemory()
    A, B = memory.put(a), memory.put(b)
    (m, depth), n = A.shape, B.shape[1]
    C = memory.empty(m, n)
    for i in range(m):
        for j in range(n):
            total = 0.0
            for k in range(depth):
                total += float(A[i, k] * B[k, j])
            C[i, j] = total
    return C.peek(), memory.counts


def closed_form(m: int, n: int, k: int) -> Counts:
    """Traffic of `run` for a (m, k) times b (k, n)."""
    return Counts(loads=2 * m * n * k, stores=m * n)


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("matmul_naive")
