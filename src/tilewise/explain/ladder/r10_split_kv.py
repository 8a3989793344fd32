"""Rung 10, split-KV decoding (Flash-Decoding, 2023): many processors for one query, merged by log-sum-exp.

Generating text, seqlen_q is 1 and rung 9 has one tile of work for a whole GPU. So the keys are cut into pieces that
run at the same time, each giving a partial output o_s and its lse_s = ln(sum of exp scores). They merge exactly, in
any order: lse = ln(sum of exp(lse_s)) and o = sum of exp(lse_s - lse) o_s. The price is the partial results, out and
back once: splits·(head_dim_v + 1) elements per query, little beside K and V.
"""

from __future__ import annotations

import numpy as np

from tilewise.explain.ladder.slow_memory import Array, Counts, SlowMemory, ceil_div, positive


def merge(o: Array, lse: Array) -> tuple[Array, Array]:
    """Partial o (splits, seqlen_q, head_dim_v) and lse (splits, seqlen_q) -> the o and lse of all keys together."""
    m = lse.max(axis=0)
    weights = np.exp(lse - m)
    total = weights.sum(axis=0)
    return np.einsum("sq,sqd->qd", weights / total, o), m + np.log(total)


def run(q: Array, k: Array, v: Array, *, splits: int = 4) -> tuple[Array, Counts]:
    """q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v) -> o (seqlen_q, head_dim_v)."""
    positive(splits=splits)
    memory = SlowMemory()
    Q, K, V = memory.put(q), memory.put(k), memory.put(v)
    (seqlen_q, head_dim), seqlen_k, head_dim_v = Q.shape, K.shape[0], V.shape[1]
    size = ceil_div(seqlen_k, splits)
    splits = ceil_div(seqlen_k, size)
    O_s, LSE_s = memory.empty(splits, seqlen_q, head_dim_v), memory.empty(splits, seqlen_q)
    O, LSE = memory.empty(seqlen_q, head_dim_v), memory.empty(seqlen_q)
    for split in range(splits):  # on a GPU, all at the same time
        keys = np.s_[split * size : (split + 1) * size]
        s = head_dim**-0.5 * Q[:] @ K[keys].T
        m = s.max(axis=1)
        p = np.exp(s - m[:, None])
        l = p.sum(axis=1)
        O_s[split], LSE_s[split] = p @ V[keys] / l[:, None], m + np.log(l)
    O[:], LSE[:] = merge(O_s[:], LSE_s[:])
    return O.peek(), memory.counts


def closed_form(seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int, *, splits: int = 4) -> Counts:
    """Traffic of `run`: K and V once, Q once a split, partial results out and back, the merged result once."""
    splits = ceil_div(seqlen_k, ceil_div(seqlen_k, splits))
    partial = splits * seqlen_q * (head_dim_v + 1)
    loads = splits * seqlen_q * head_dim + seqlen_k * (head_dim + head_dim_v) + partial
    return Counts(loads=loads, stores=partial + seqlen_q * (head_dim_v + 1))


if __name__ == "__main__":
    from tilewise.explain.ladder import show

    show("split_kv")
