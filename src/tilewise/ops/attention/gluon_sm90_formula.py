"""A formula on a tile of scores, for Hopper's forward kernels: what it makes of them, and which it hides."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.tiles.hopper import hidden, hide_outside, with_columns


@gluon.jit
def scored(s, first, rows, formula, fixed):
    """What the formula makes of the scores of the tile of keys from number `first` on."""
    LAYOUT: gl.constexpr = s.type.layout
    _mask_args, _mask_nums, score_args, score_nums = formula
    b, h, offs_i, last_key = rows[0], rows[1], rows[2], rows[4]
    offs_n = first + gl.arange(0, fixed.block_n, layout=gl.SliceLayout(0, LAYOUT))
    offs_j = gl.minimum(offs_n, last_key) if len(score_args) > 0 else offs_n
    of_score = with_columns(
        rows[6][1], b, h, first, last_key, score_args, score_nums, fixed.score_columns, LAYOUT,
        fixed.block_n,
    )  # fmt: skip
    return fixed.score(s, b, h, offs_i[:, None], offs_j[None, :], of_score, score_args, score_nums)


@gluon.jit
def seen_in(first, rows, formula, fixed, LAYOUT: gl.constexpr):
    """Whether queries see the keys of a tile, by the mask's formula, in the layout of their scores; beyond the last key
    as that is seen.
    """
    mask_args, mask_nums, _score_args, _score_nums = formula
    b, h, offs_i, last_key = rows[0], rows[1], rows[2], rows[4]
    offs_n = first + gl.arange(0, fixed.block_n, layout=gl.SliceLayout(0, LAYOUT))
    offs_j = gl.minimum(offs_n, last_key)  # formulas see valid positions only
    of_mask = with_columns(
        rows[6][0], b, h, first, last_key, mask_args, mask_nums, fixed.mask_columns, LAYOUT, fixed.block_n
    )
    return fixed.visible(b, h, offs_i[:, None], offs_j[None, :], of_mask, mask_args, mask_nums)


@gluon.jit
def with_hidden(s, first, rows, formula, fixed):
    """Scores of a tile of keys, far below all others or -inf where the mask, or the sequence's end, hides them."""
    LAYOUT: gl.constexpr = s.type.layout
    HIDDEN: gl.constexpr = hidden(fixed.scale_first or fixed.linear is not None)
    if fixed.visible is not None:
        s = gl.where(seen_in(first, rows, formula, fixed, LAYOUT), s, float("-inf"))
        if first + fixed.block_n > rows[3]:
            s = hide_outside(s, first, rows[5][0], rows[5][1], HIDDEN)
    else:
        s = hide_outside(s, first, rows[5][0], rows[5][1], HIDDEN)
    return s
