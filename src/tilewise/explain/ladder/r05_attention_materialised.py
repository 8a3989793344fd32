"""Rung 5, attention as three calls of a library: S = Q·Kᵀ, P = softmax(S), O = P·V, each result written out in full.

Even if every one of the three touches its operands only once (ideal caches, a row of S held while it is normalised),
S and P are seqlen_q × seqlen_k matrices that go out to slow memory and come back: 4·seqlen_q·seqlen_k elements of
traffic that nobody asked for. At 8,192 tokens S alone is 64 Mi elements per head; Q, K, V and O together are a few
Mi.
"""

from __future__ import annotations

import numpy as np

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory


def run(q: Array, k: Array, v: Array) -> tuple[Array, Counts]:
    """q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v) -> o (seqlen_q, head_dim_v)."""
    memory = SlowMemory()
    Q, K, V = memory.put(q), memory.put(k), memory.put(v)
    seqlen_q, seqlen_k, scale = Q.shape[0], K.shape[0], Q.shape[1] ** -0.5
    S, P = memory.empty(seqlen_q, seqlen_k), memory.empty(seqlen_q, seqlen_k)
    O = memory.empty(seqlen_q, V.shape[1])
    S[:] = scale * Q[:] @ K[:].T
    for i in range(seqlen_q):
        s = S[i]
        p = np.exp(s - s.max())
        P[i] = p / p.sum()
    O[:] = P[:] @ V[:]
    return O.peek(), memory.counts


def closed_form(seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int) -> Counts:
    """Traffic of `run`: the operands once, and S and P both ways."""
    operands = seqlen_q * head_dim + seqlen_k * (head_dim + head_dim_v)
    return Counts(loads=operands + 2 * seqlen_q * seqlen_k, stores=2 * seqlen_q * seqlen_k + seqlen_q * head_dim_v)


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("attention_materialised")
