"""A formula on a tile of scores, for Hopper's forward kernels: what it makes of them, and which it hides."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.tiles.hopper import hide_outside, with_columns


@gluon.jit
def scored(s, n, rows, formula, fixed):
    """What the formula makes of the scores of key tile n."""
    LAYOUT: gl.constexpr = s.type.layout
    _mask_args, _mask_nums, score_args, score_nums = formula
    b, h, offs_i, last_key = rows[0], rows[1], rows[2], rows[4]
    offs_n = n * fixed.block_n + gl.arange(0, fixed.block_n, layout=gl.SliceLayout(0, LAYOUT))
    offs_j = gl.minimum(offs_n, last_key) if len(score_args) > 0 else offs_n
    of_score = with_columns(
        rows[6][1], b, h, n * fixed.block_n, last_key, score_args, score_nums, fixed.score_columns, LAYOUT,
        fixed.block_n,
    )  # fmt: skip
    return fixed.score(s, b, h, offs_i[:, None], offs_j[None, :], of_score, score_args, score_nums)


@gluon.jit
def seen_in(n, rows, formula, fixed, LAYOUT: gl.constexpr):
    """Whether queries see the keys of tile n, by the mask's formula, in the layout of their scores;
    beyond the last key as that is seen.
    """
    mask_args, mask_nums, _score_args, _score_nums = formula
    b, h, offs_i, last_key = rows[0], rows[1], rows[2], rows[4]
    offs_n = n * fixed.block_n + gl.arange(0, fixed.block_n, layout=gl.SliceLayout(0, LAYOUT))
    offs_j = gl.minimum(offs_n, last_key)  # formulas see valid positions only
    of_mask = with_columns(
        rows[6][0], b, h, n * fixed.block_n, last_key, mask_args, mask_nums, fixed.mask_columns, LAYOUT, fixed.block_n
    )
    return fixed.visible(b, h, offs_i[:, None], offs_j[None, :], of_mask, mask_args, mask_nums)


@gluon.jit
def with_hidden(s, n, rows, formula, fixed):
    """Scores of key tile n, far below all others or -inf where the mask, or the sequence's end, hides them."""
    LAYOUT: gl.constexpr = s.type.layout
    if fixed.visible is not None:
        s = gl.where(seen_in(n, rows, formula, fixed, LAYOUT), s, float("-inf"))
        if n * fixed.block_n + fixed.block_n > rows[3]:
            s = hide_outside(s, n * fixed.block_n, rows[5][0], rows[5][1])
    else:
        s = hide_outside(s, n * fixed.block_n, rows[5][0], rows[5][1])
    return s
