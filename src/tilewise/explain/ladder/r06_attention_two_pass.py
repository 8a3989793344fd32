"""Rung 6, attention a query at a time, in two passes over the keys: online softmax first, then the weighted sum.

The first pass computes each score, writes it out and keeps the running maximum m and sum l of rung 4; the second
reads the scores back, now that m and l are final, and adds up the values. P is never stored. One row of scores is: it
does not fit in fast memory for long sequences, so each of the seqlen_q·seqlen_k scores still goes out and comes back
once.
"""

from __future__ import annotations

import math

import numpy as np

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory


def run(q: Array, k: Array, v: Array) -> tuple[Array, Counts]:
    """q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v) -> o (seqlen_q, head_dim_v)."""
    memory = SlowMemory()
    Q, K, V = memory.put(q), memory.put(k), memory.put(v)
    seqlen_q, seqlen_k, scale = Q.shape[0], K.shape[0], Q.shape[1] ** -0.5
    S, O = memory.empty(seqlen_k), memory.empty(seqlen_q, V.shape[1])
    for i in range(seqlen_q):
        q_i, m, l = Q[i], -math.inf, 0.0
        for j in range(seqlen_k):
            s = scale * float(q_i @ K[j])
            m_new = max(m, s)
            l = l * math.exp(m - m_new) + math.exp(s - m_new)
            m, S[j] = m_new, s
        acc = np.zeros(V.shape[1])
        for j in range(seqlen_k):
            acc += np.exp(S[j] - m) / l * V[j]
        O[i] = acc
    return O.peek(), memory.counts


def closed_form(seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int) -> Counts:
    """Traffic of `run`: K and V once a query, and each score out and back."""
    loads = seqlen_q * (head_dim + seqlen_k * (head_dim + head_dim_v + 1))
    return Counts(loads=loads, stores=seqlen_q * (seqlen_k + head_dim_v))


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("attention_two_pass")
