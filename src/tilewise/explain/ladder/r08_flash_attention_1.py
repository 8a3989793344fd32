"""Rung 8, FlashAttention (Dao et al., 2022): rung 7 by tiles, keys outside, queries inside.

A tile of K and V stays in fast memory while every tile of Q passes by. The unfinished O, m and l of a query tile wait
in slow memory between visits and are read and written once for every key tile. The block rule fills a fast memory of
M elements: four blocks of Bc × head_dim fit when Bc = ceil(M / 4d), and Br = min(Bc, d) keeps the scores Br × Bc
within M / 4 too. Key tiles number about 4·seqlen·d / M, so the traffic is O(seqlen²·d² / M): more fast memory, fewer
visits.
"""

from __future__ import annotations

import numpy as np

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory, ceil_div, positive


def block_rule(fast_memory: int, head_dim: int) -> tuple[int, int]:
    """(Br, Bc), query rows and key columns of a tile, for a fast memory of that many elements."""
    positive(fast_memory=fast_memory, head_dim=head_dim)
    block_n = ceil_div(fast_memory, 4 * head_dim)
    return min(block_n, head_dim), block_n


def run(q: Array, k: Array, v: Array, *, fast_memory: int = 1024) -> tuple[Array, Counts]:
    """q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v) -> o (seqlen_q, head_dim_v)."""
    memory = SlowMemory()
    Q, K, V = memory.put(q), memory.put(k), memory.put(v)
    (seqlen_q, head_dim), seqlen_k, head_dim_v = Q.shape, K.shape[0], V.shape[1]
    block_m, block_n = block_rule(fast_memory, head_dim)
    O, M, L = memory.empty(seqlen_q, head_dim_v), memory.empty(seqlen_q), memory.empty(seqlen_q)
    O[:], M[:], L[:] = 0.0, -np.inf, 0.0
    for n in range(0, seqlen_k, block_n):
        k_n, v_n = K[n : n + block_n], V[n : n + block_n]
        for i in range(0, seqlen_q, block_m):
            rows = np.s_[i : i + block_m]
            s = head_dim**-0.5 * Q[rows] @ k_n.T
            m_old, l_old = M[rows], L[rows]
            m = np.maximum(m_old, s.max(axis=1))
            p = np.exp(s - m[:, None])
            weight = l_old * np.exp(m_old - m)
            l = weight + p.sum(axis=1)
            O[rows] = (weight[:, None] * O[rows] + p @ v_n) / l[:, None]
            M[rows], L[rows] = m, l
    return O.peek(), memory.counts


def closed_form(seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int, *, fast_memory: int = 1024) -> Counts:
    """Traffic of `run`: K and V once; Q, and O, m, l both ways, once for every key tile."""
    tiles, state = ceil_div(seqlen_k, block_rule(fast_memory, head_dim)[1]), head_dim_v + 2
    loads = seqlen_k * (head_dim + head_dim_v) + tiles * seqlen_q * (head_dim + state)
    return Counts(loads=loads, stores=(tiles + 1) * seqlen_q * state)


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("flash_attention_1")
