"""Scales of queries and keys for `gluon_sm90_codes`, each where a warpgroup has what it belongs to."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def block_of_queries(codes, run, row0, seqlen_q, fixed, C: gl.constexpr):
    """Which block of queries a warpgroup's 64 are."""
    blocks = codes[5]
    b, h, start = run[0], run[1], run[3]
    block = gl.minimum(start // 64 + C, (seqlen_q - 1) // 64)
    first = h * blocks + row0 // 64 + b if fixed.packed else (b * fixed.heads + h) * blocks
    return (first + block).to(gl.int64)


@gluon.jit
def scales_of_queries(codes, block, fixed, ROW: gl.constexpr):
    """The scale of each of a warpgroup's 64 queries."""
    GROUPS: gl.constexpr = fixed.q_groups
    r = gl.arange(0, 64, layout=ROW)
    if GROUPS == 64:
        group = r
    elif GROUPS == 32:
        group = r // 16 * 8 + r % 8
    elif GROUPS == 4:
        group = r // 16
    else:
        group = 0 * r
    return gl.load(codes[0] + block * GROUPS + group)


@gluon.jit
def scales_of_keys(codes, first, n, fixed, LAYOUT: gl.constexpr):
    """Of a tile of keys: one for each, or one for each thread of a quad."""
    GROUPS: gl.constexpr = fixed.k_groups
    group = gl.arange(0, fixed.block_n if fixed.block_n == GROUPS else 4, layout=LAYOUT)
    if GROUPS == 1:
        group = 0 * group
    return gl.load(codes[1] + (first + n).to(gl.int64) * GROUPS + group)


@gluon.constexpr_function
def alike(q_groups, k_groups):
    """Whether a warpgroup's queries have one scale, and the keys of a tile."""
    return q_groups == 1 and k_groups == 1


@gluon.jit
def near_scales_of_queries(codes, block, of_queries, c, fixed):
    """(what `weights_of_kept` has of queries: their scales times c, `of_queries`, or a number where they are alike; the
    least and the largest of them)
    """
    ALIKE: gl.constexpr = alike(fixed.q_groups, fixed.k_groups)
    if ALIKE:
        scale = gl.load(codes[0] + block) * c
        return scale, (scale, scale)
    else:
        return of_queries, (gl.min(of_queries, 0), gl.max(of_queries, 0))


@gluon.jit
def near_scales_of_keys(codes, first, n, fixed, LAYOUT: gl.constexpr):
    """And of a tile of keys."""
    ALIKE: gl.constexpr = alike(fixed.q_groups, fixed.k_groups)
    if ALIKE:
        return gl.load(codes[1] + first + n)
    else:
        return scales_of_keys(codes, first, n, fixed, LAYOUT)
