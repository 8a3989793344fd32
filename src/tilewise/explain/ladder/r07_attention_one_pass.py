"""Rung 7, attention a query at a time, in one pass: the output is rescaled as the maximum moves, like the sum.

Rung 6 waited for the final m only to weigh the values. But the unfinished output acc = sum of exp(s_j - m) v_j
carries the same factor as l, so the same scaling mends it when m changes. The scores now live for one step and are
never stored: slow memory sees Q, K, V and O alone. This recurrence is the heart of FlashAttention; what remains is to
tile it.
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
    O = memory.empty(seqlen_q, V.shape[1])
    for i in range(seqlen_q):
        q_i, m, l = Q[i], -math.inf, 0.0
        acc = np.zeros(V.shape[1])
        for j in range(seqlen_k):
            s = scale * float(q_i @ K[j])
            m_new = max(m, s)
            alpha, p = math.exp(m - m_new), math.exp(s - m_new)
            l = l * alpha + p
            acc = acc * alpha + p * V[j]
            m = m_new
        O[i] = acc / l
    return O.peek(), memory.counts


def closed_form(seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int) -> Counts:
    """Traffic of `run`: K and V once a query, and no scores."""
    loads = seqlen_q * (head_dim + seqlen_k * (head_dim + head_dim_v))
    return Counts(loads=loads, stores=seqlen_q * head_dim_v)


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("attention_one_pass")
