"""Scores of pairs of tiles on a GPU: a program adds up the blocks of some tiles of queries and some of keys of a head,
and multiplies their means. Those with the first keys, or queries, also say how alike rows are.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.tile_scores.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key

_FEW = 256  # tiles of queries up to which a program has 16 of them, beyond 64: many programs, or little read twice
_KEYS = 64  # tiles of keys of a program
_PLANS = Plans()


@triton.jit
def means_of(
    SUMS, head, tile, blocks, rows, DIM: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Means of some tiles of a head  # [TILES, DIM]"""
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([tile.shape[0], BLOCK_D], tl.float32)
    for n in tl.static_range(EACH):
        block = tile * EACH + n
        at = SUMS + ((head * blocks + block) * DIM)[:, None] + d[None, :]
        total += tl.load(at, mask=(block < blocks)[:, None] & (d < DIM)[None, :], other=0.0)
    count = tl.maximum(tl.minimum(rows - tile * TILE, TILE), 1).to(tl.float32)
    return total * (1.0 / count)[:, None]


@triton.jit(do_not_specialize=["blocks_q", "blocks_k", "rows_q", "rows_k", "tiles_q", "tiles_k", "scale"])
def tile_scores_fwd(
    Q_SUMS, K_SUMS, Q_UNITS, K_UNITS, SCORES, SIMILAR_Q, SIMILAR_K,
    blocks_q, blocks_k, rows_q, rows_k, tiles_q, tiles_k, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, EACH_Q: tl.constexpr, EACH_K: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # who am I
    first_n = tl.program_id(0) % tl.cdiv(tiles_k, BLOCK_N) * BLOCK_N
    rest = tl.program_id(0) // tl.cdiv(tiles_k, BLOCK_N)
    first_m = rest % tl.cdiv(tiles_q, BLOCK_M) * BLOCK_M
    head = (rest // tl.cdiv(tiles_q, BLOCK_M)).to(tl.int64)  # of all sequences
    head_kv = head // GROUP
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)

    q = means_of(Q_SUMS, head, m, blocks_q, rows_q, DIM, EACH_Q, TILE_Q, BLOCK_D)
    k = means_of(K_SUMS, head_kv, n, blocks_k, rows_k, DIM, EACH_K, TILE_K, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    at = SCORES + ((head * tiles_q + m) * tiles_k)[:, None] + n[None, :]
    tl.store(at, s, mask=(m < tiles_q)[:, None] & (n < tiles_k)[None, :])
    if Q_UNITS is not None:
        if first_n == 0:
            alike = means_of(Q_UNITS, head, m, blocks_q, rows_q, DIM, EACH_Q, TILE_Q, BLOCK_D)
            tl.store(SIMILAR_Q + head * tiles_q + m, tl.sum(alike * alike, 1), mask=m < tiles_q)
        if (first_m == 0) & (head % GROUP == 0):
            alike = means_of(K_UNITS, head_kv, n, blocks_k, rows_k, DIM, EACH_K, TILE_K, BLOCK_D)
            tl.store(SIMILAR_K + head_kv * tiles_k + n, tl.sum(alike * alike, 1), mask=n < tiles_k)


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills scores, and similarities where they are wanted."""
    found = tuple(results.get(name) for name in ("scores", "similar_q", "similar_k"))
    tensors = (call.q_sums, call.k_sums, call.q_units, call.k_units, *found)
    key = tensors_key(*(x for x in tensors if x is not None))
    key = None if key is None else (key, call.rows, call.block, call.each)
    plan = _PLANS.get(key)
    if plan is None:
        batch, heads, blocks_q, dim = call.q_sums.shape
        heads_kv, blocks_k = call.k_sums.shape[1:3]
        block_m = 16 if call.tiles[0] <= _FEW else 64
        grid = batch * heads * triton.cdiv(call.tiles[0], block_m) * triton.cdiv(call.tiles[1], _KEYS)
        block_d = max(16, triton.next_power_of_2(dim))
        constants = (heads // heads_kv, dim, *call.each, *call.block, block_m, _KEYS, block_d)
        sizes = (blocks_q, blocks_k, *call.rows, *call.tiles)
        plan = _PLANS.put(key, Plan(tile_scores_fwd, grid, (), sizes, constants, 4, 1))
    with on_device(call.q_sums):
        plan.launch(tensors, (), (call.scale,))
