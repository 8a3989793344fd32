"""Rung 9, FlashAttention-2 (Dao, 2023): the loops swapped, the division delayed, tiles above the diagonal skipped.

Queries outside, keys inside: O, m and l of a tile live in registers from the first key to the last and are written
once, so their traffic no longer grows with the number of key tiles. acc stays unnormalised until the end. (m, l)
leave as one number per row, lse = m + ln l, all the backward pass needs. Query tiles are independent: each can have its
own processor. Causal masking is aligned bottom-right, so the last query sees the last key; a key tile that no query
of the tile may see is neither loaded nor computed, and a row with no visible key gives o = 0 and lse = -inf.
"""

from __future__ import annotations

import numpy as np

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory, ceil_div, positive


def run(
    q: Array, k: Array, v: Array, *, block_m: int = 16, block_n: int = 16, causal: bool = False
) -> tuple[Array, Counts]:
    """q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v) -> o (seqlen_q, head_dim_v)."""
    positive(block_m=block_m, block_n=block_n)
    memory = SlowMemory()
    Q, K, V = memory.put(q), memory.put(k), memory.put(v)
    (seqlen_q, head_dim), seqlen_k, head_dim_v = Q.shape, K.shape[0], V.shape[1]
    O, LSE = memory.empty(seqlen_q, head_dim_v), memory.empty(seqlen_q)
    for i in range(0, seqlen_q, block_m):
        q_i = Q[i : i + block_m]
        positions = np.arange(i, i + len(q_i)) + seqlen_k - seqlen_q  # on the key axis
        end = positions[-1] + 1 if causal else seqlen_k
        m, l, acc = np.full(len(q_i), -np.inf), np.zeros(len(q_i)), np.zeros((len(q_i), head_dim_v))
        for n in range(0, end, block_n):
            k_n, v_n = K[n : n + block_n], V[n : n + block_n]
            s = head_dim**-0.5 * q_i @ k_n.T
            if causal:
                s = np.where(positions[:, None] >= np.arange(n, n + len(k_n)), s, -np.inf)
            m_new = np.maximum(m, s.max(axis=1))
            finite = np.where(np.isneginf(m_new), 0.0, m_new)  # a row that has seen no key yet: avoid inf - inf
            alpha, p = np.exp(m - finite), np.exp(s - finite[:, None])
            m, l, acc = m_new, l * alpha + p.sum(axis=1), acc * alpha[:, None] + p @ v_n
        O[i : i + block_m] = acc / np.where(l == 0, 1.0, l)[:, None]
        LSE[i : i + block_m] = m + np.log(np.where(l == 0, 1.0, l))
    return O.peek(), memory.counts


def closed_form(
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    *,
    block_m: int = 16,
    block_n: int = 16,
    causal: bool = False,
) -> Counts:
    """Traffic of `run`: Q once, the visited K and V tiles once for every query tile, O and lse once."""
    last_queries = (min(i + block_m, seqlen_q) - 1 for i in range(0, seqlen_q, block_m))
    ends = (max(0, last + 1 + seqlen_k - seqlen_q) if causal else seqlen_k for last in last_queries)
    keys = sum(min(ceil_div(end, block_n) * block_n, seqlen_k) for end in ends)
    return Counts(seqlen_q * head_dim + keys * (head_dim + head_dim_v), seqlen_q * (head_dim_v + 1))


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("flash_attention_2")
