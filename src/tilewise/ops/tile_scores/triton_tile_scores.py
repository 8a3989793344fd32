"""Scores of pairs of tiles on a GPU: a program adds up the blocks of some tiles of queries and some of keys of a head,
and multiplies their means; others of the same launch say how alike the rows of some tiles are.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.tile_scores.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.early import begin_early, early_for

_FEW = 256  # tiles of queries up to which a program has 16 of them, beyond 64: many programs, or little read twice
_KEYS = 64  # tiles of keys of a program, and of either where rows are compared
_STEP = 64  # dimensions at a time
_PLANS = Plans()


@triton.jit
def means_of(SUMS, head, tile, d, blocks, rows, DIM: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr):
    """Means of some tiles of a head in some dimensions  # [TILES, STEP]"""
    total = tl.zeros([tile.shape[0], d.shape[0]], tl.float32)
    for n in tl.static_range(EACH):
        block = tile * EACH + n
        at = SUMS + ((head * blocks + block) * DIM)[:, None] + d[None, :]
        total += tl.load(at, mask=(block < blocks)[:, None] & (d < DIM)[None, :], other=0.0)
    count = tl.maximum(tl.minimum(rows - tile * TILE, TILE), 1).to(tl.float32)
    return total * (1.0 / count)[:, None]


@triton.jit
def compare_rows(
    pid, UNITS, SIMILAR, blocks, rows, tiles, DIM: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """How alike the rows of some tiles are: the squared length of the mean of what has length 1."""
    head = (pid // tl.cdiv(tiles, BLOCK)).to(tl.int64)
    tile = pid % tl.cdiv(tiles, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    alike = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, DIM, STEP, loop_unroll_factor=2):
        mean = means_of(UNITS, head, tile, start + tl.arange(0, STEP), blocks, rows, DIM, EACH, TILE)
        alike += tl.sum(mean * mean, 1)
    tl.store(SIMILAR + head * tiles + tile, alike, mask=tile < tiles)


@triton.jit
def multiply_means(
    pid, Q_SUMS, K_SUMS, SCORES, blocks_q, blocks_k, rows_q, rows_k, tiles_q, tiles_k, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, EACH_Q: tl.constexpr, EACH_K: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Scores of some tiles of queries and some of keys of a head."""
    rest = pid // tl.cdiv(tiles_k, BLOCK_N)
    head = (rest // tl.cdiv(tiles_q, BLOCK_M)).to(tl.int64)  # of all sequences
    m = rest % tl.cdiv(tiles_q, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid % tl.cdiv(tiles_k, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, DIM, STEP, loop_unroll_factor=2):
        d = start + tl.arange(0, STEP)
        q = means_of(Q_SUMS, head, m, d, blocks_q, rows_q, DIM, EACH_Q, TILE_Q)
        k = means_of(K_SUMS, head // GROUP, n, d, blocks_k, rows_k, DIM, EACH_K, TILE_K)
        s = tl.dot(q, tl.trans(k), s, input_precision="tf32x3")
    at = SCORES + ((head * tiles_q + m) * tiles_k)[:, None] + n[None, :]
    tl.store(at, s * scale, mask=(m < tiles_q)[:, None] & (n < tiles_k)[None, :])


@triton.jit(do_not_specialize=["heads", "blocks_q", "blocks_k", "rows_q", "rows_k", "tiles_q", "tiles_k", "scale"])
def tile_scores_fwd(
    Q_SUMS, K_SUMS, Q_UNITS, K_UNITS, SCORES, SIMILAR_Q, SIMILAR_K,
    heads, blocks_q, blocks_k, rows_q, rows_k, tiles_q, tiles_k, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, EACH_Q: tl.constexpr, EACH_K: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    of_scores = heads * tl.cdiv(tiles_q, BLOCK_M) * tl.cdiv(tiles_k, BLOCK_N)
    pid = tl.program_id(0)
    if pid < of_scores:
        multiply_means(
            pid, Q_SUMS, K_SUMS, SCORES, blocks_q, blocks_k, rows_q, rows_k, tiles_q, tiles_k, scale,
            GROUP, DIM, EACH_Q, EACH_K, TILE_Q, TILE_K, BLOCK_M, BLOCK_N, STEP,
        )  # fmt: skip
    if Q_UNITS is not None:
        pid -= of_scores
        of_q = heads * tl.cdiv(tiles_q, BLOCK_N)
        if (pid >= 0) & (pid < of_q):
            compare_rows(pid, Q_UNITS, SIMILAR_Q, blocks_q, rows_q, tiles_q, DIM, EACH_Q, TILE_Q, BLOCK_N, STEP)
        if pid >= of_q:
            compare_rows(pid - of_q, K_UNITS, SIMILAR_K, blocks_k, rows_k, tiles_k, DIM, EACH_K, TILE_K, BLOCK_N, STEP)


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
        of_q, of_k = (triton.cdiv(tiles, _KEYS) for tiles in call.tiles)
        grid = batch * heads * triton.cdiv(call.tiles[0], block_m) * of_k
        if call.q_units is not None:
            grid += batch * (heads * of_q + heads_kv * of_k)
        early = early_for(call.q_sums.device)
        constants = (heads // heads_kv, dim, *call.each, *call.block, block_m, _KEYS, _STEP, early)
        sizes = (batch * heads, blocks_q, blocks_k, *call.rows, *call.tiles)
        plan = _PLANS.put(key, Plan(tile_scores_fwd, grid, (), sizes, constants, 4, 1, early=early > 0))
    with on_device(call.q_sums):
        plan.launch(tensors, (), (call.scale,))
