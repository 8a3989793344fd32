"""Scores and their gradients in Hopper's backward kernels: a warpgroup has 64 rows, its own queries or keys, and a tile
of the others along the columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.ops.attention.gluon_sm90_runs import ends_of
from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.hopper import only_within, product_layout, tilt_of, tilted, with_columns
from tilewise.tiles.visit import call_once, proved


@gluon.jit
def own_rows(run, lengths, first, formula, fixed, COLUMNS: gl.constexpr):
    """What a warpgroup knows of its 64 queries or keys, from number `first` on: (batch, head, (numbers of queries and
    of keys), positions, ends of the run that each sees or that sees it, what formulas compute once, tilt of a linear
    score).
    """
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(COLUMNS))
    b, h = run[0], run[1]
    seqlen_q, seqlen_k = lengths
    mask_args, mask_nums, score_args, score_nums, _ = formula
    offs = first + gl.arange(0, 64, layout=ROW)
    if fixed.of_keys:
        begin = seqlen_k - seqlen_q  # positions of queries
        rows = proved(gl.minimum(offs, seqlen_k - 1), seqlen_q)
        inside = offs < seqlen_k
    else:
        begin = 0 * seqlen_k
        rows = proved(gl.minimum(offs, seqlen_q - 1) + seqlen_k - seqlen_q, seqlen_k)
        inside = offs < seqlen_q
    start, end = ends_of(run, rows, begin, seqlen_k, formula, fixed)
    end = gl.where(inside, end, start - 1)
    mask_once = call_once(b, h, rows[:, None], mask_args, mask_nums, fixed.mask_once)
    score_once = call_once(b, h, rows[:, None], score_args, score_nums, fixed.score_once)
    tilt = tilt_of(b, h, score_args, score_nums, fixed.linear)
    return b, h, lengths, rows, (start, end), (mask_once, score_once), tilt


@gluon.jit
def of_queries(ring, stage, LAYOUT: gl.constexpr):
    """A number for each query of a tile [1, M], along the columns of its transposed scores."""
    return ring.index(stage).load(LAYOUT)


@gluon.jit
def product_from(start, a, rows):
    """Start a [64, D] times the transpose of rows [N, D], on top of `start` [1, N] or [64, 1]."""
    N: gl.constexpr = rows.shape[0]
    acc, _ = gl.broadcast(start, gl.zeros([64, N], gl.float32, layout=product_layout(N)))
    return warpgroup_mma(a, rows.permute((1, 0)), acc, is_async=True)


@gluon.jit
def start_scores(a, rows, shift, own, scalars, fixed):
    """Start the scores of a warpgroup's own rows `a` with a tile of others; `shift` is -lse of the queries, in base 2
    if scores are scaled first, else in units of them.
    """
    N: gl.constexpr = rows.shape[0]
    SCORES: gl.constexpr = product_layout(N)
    if fixed.scale_first:
        zeros = gl.zeros([64, N], gl.float32, layout=SCORES)
        s = warpgroup_mma(a, rows.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        start = shift
        if fixed.linear is not None:
            tilt = own[6]
            columns = gl.arange(0, N, layout=gl.SliceLayout(0, SCORES)).to(gl.float32)
            start = start + ((tilt[0] if fixed.of_keys else tilt[1]) / scalars[1] * columns)[None, :]
        s = product_from(start, a, rows)
    return s


@gluon.jit
def probabilities(s, shift, n, own, formula, scalars, fixed, MASKED: gl.constexpr):
    """(P of tile n of the others, (scaled scores, positions i and j, what the score's formula has for the tile)), from
    what `start_scores` started.
    """
    N: gl.constexpr = s.shape[1]
    SCORES: gl.constexpr = s.type.layout
    b, h, lengths, rows, ends, onces, tilt = own
    seqlen_q, seqlen_k = lengths
    start, end = ends
    mask_once, score_once = onces
    scale, c = scalars
    mask_args, mask_nums, score_args, score_nums, _ = formula
    first = n * N + (seqlen_k - seqlen_q if fixed.of_keys else 0)
    last = seqlen_k - 1
    columns = first + gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
    columns = gl.minimum(columns, last)  # formulas see valid positions only
    if fixed.of_keys:
        i, j = columns[None, :], rows[:, None]
    else:
        i, j = rows[:, None], columns[None, :]
    raw = s
    of_score = score_once
    if fixed.scale_first:
        raw = s * scale
        s = raw
        if fixed.score is not None:
            of_score = with_columns(
                score_once, b, h, first, last, score_args, score_nums, fixed.score_columns, SCORES, N
            )
            s = fixed.score(raw, b, h, i, j, of_score, score_args, score_nums)
        p = gl.exp2(s * LOG2E + shift)
    elif fixed.linear is not None:
        p = gl.exp2(s * c + tilted(tilt, rows, first, 1 if fixed.of_keys else 0)[:, None])
    else:
        p = gl.exp2(s * c)
    if MASKED:
        if fixed.visible is not None:
            of_mask = with_columns(mask_once, b, h, first, last, mask_args, mask_nums, fixed.mask_columns, SCORES, N)
            seen = fixed.visible(b, h, i, j, of_mask, mask_args, mask_nums) & (start <= end)[:, None]
            if not fixed.of_keys:
                seen = seen & (n * N + gl.arange(0, N, layout=gl.SliceLayout(0, SCORES)) < seqlen_k)[None, :]
            p = gl.where(seen, p, 0.0)
        else:
            p = only_within(p, first, start, end)
    elif fixed.ordered and fixed.score is not None:  # of rows that are not there a score may be no number
        p = gl.where(shift == float("-inf"), 0.0, p)
    return p, (raw, i, j, of_score)


@gluon.jit
def through_score(ds, p, around, own, formula, fixed, MASKED: gl.constexpr):
    """The gradient of the scaled scores from that of what their formula made of them (`around`: `probabilities`)."""
    if fixed.slope is not None:
        raw, i, j, of_score = around
        ds = fixed.slope(ds, raw, own[0], own[1], i, j, of_score, formula[2], formula[3])
        if MASKED or fixed.ordered:
            ds = gl.where(p == 0.0, 0.0, ds)  # a hidden score may have no finite derivative
    return ds
