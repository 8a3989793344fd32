"""Scores of tokens by tensor cores, in Gluon: codes of 4 bits in pages of 256 tokens, and one query for a head of keys.

A warp has a page of a row's request, of one head, and loads all that it reads of it before it uses any. A lane
(r, c) = (lane // 4, lane % 4) has words 4 r + j of a page's columns, j < 4, and a quarter of the dimensions, I c + i,
i < I: what loads of 16 bytes bring is what products take, without a word that moves. Of a product rows are (half of the
page, r), sums go over (i, c, v) and columns are (j, v): bytes u and u + 2 v of a word lie in one register, as halves
below 2**-14, which are their codes over 2**24 (2**20 for the upper ones). A column takes those of its own v, and its j
is the one whose product adds to it. So a lane gets the scores of its word 4 r + c, four tokens side by side.

A key is least + code * step, so a score is the sum of q * least and of w * code, with w = q * step. Weights w are
rounded to halves, and what that leaves of one, 2**-11 of it at most, is added times the middle of codes, 7.5: a score
is off by 2**-8 of a code's step at most for each dimension.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.ops.token_scores.problem import OF_SAMPLE, PLACE
from tilewise.tiles.gluon_api import barrier
from tilewise.tiles.log_sum import LN2, LOG2E

PAGE = gl.constexpr(256)  # tokens
EACH, STEP = gl.constexpr(OF_SAMPLE), gl.constexpr(PLACE)
_LOG2 = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")  # of 0, or of about 1 and more


# layouts: a warp has a page -------------------------------------------------------------------------------------------


@gluon.constexpr_function
def powers(end):
    """Those of two below another one."""
    return [2**n for n in range(end.bit_length() - 1)]


@gluon.constexpr_function
def layout_of_words(pages, ranks):
    """[pages, words of a column, dimensions]"""
    own = ranks // 4
    registers = [[0, 1, 0], [0, 2, 0], *([0, 0, n] for n in powers(own))]
    lanes = [[0, 0, own], [0, 0, 2 * own], [0, 4, 0], [0, 8, 0], [0, 16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[n, 0, 0] for n in powers(pages)], [], [pages, 32, ranks])


@gluon.constexpr_function
def layout_of_weights(pages, ranks):
    """[pages, dimensions, columns of a product]"""
    own = ranks // 4
    registers = [[0, n, 0] for n in powers(own)]
    lanes = [[0, own, 0], [0, 2 * own, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[n, 0, 0] for n in powers(pages)], [], [pages, ranks, 8])


@gluon.constexpr_function
def layout_of_ends(pages, ranks):
    """[pages, dimensions]: one of a lane, of 16 one of two lanes."""
    lanes = [[0, n % ranks] for n in powers(32)]
    return gl.DistributedLinearLayout([], lanes, [[n, 0] for n in powers(pages)], [], [pages, ranks])


# weights -------------------------------------------------------------------------------------------------------------


@gluon.jit
def unit_of(top):
    """(a power of two that makes numbers up to top less than 2**15, its inverse)"""
    e = gl.maximum(top.to(gl.int32, bitcast=True) >> 23, 15)
    return ((268 - e) << 23).to(gl.float32, bitcast=True), ((e - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def weights_of(q, low, high):
    """(weights, as numbers less than 2**15 that become halves, [pages, dimensions]; what such a one is worth; what
    scores begin with, [pages])
    """
    w = q * ((high - low) * (1.0 / 15))
    unit, inverse = unit_of(gl.max(gl.abs(w), 1))
    w = w * unit[:, None]
    rest = w - w.to(gl.float16).to(gl.float32)
    return w, inverse, gl.sum(q * low + rest * (inverse * 7.5)[:, None], 1)


# products ------------------------------------------------------------------------------------------------------------


@gluon.jit
def halves(x):
    """Integers as two halves each, along a last axis."""
    return gl.join(x.to(gl.int16), (x >> 16).to(gl.int16)).to(gl.float16, bitcast=True)


@gluon.jit
def fours(x):
    """The four tensors along the last two axes."""
    a, b = gl.split(x)
    c, e = gl.split(a)
    d, f = gl.split(b)
    return c, d, e, f


@gluon.jit
def codes_of(x, LAYOUT: gl.constexpr):
    """Bytes 0 and 2 of words [pages, r, dimensions]  # [pages, (half, r), (i, c, v)]"""
    x = halves(gl.join(x & 0x000F000F, x & 0x00F000F0))
    x = x.reshape(x.shape[0], 8, 4, x.shape[2] // 4, 2, 2)  # r, c, i, half, v
    x = x.permute(0, 4, 1, 3, 2, 5).reshape(x.shape[0], 16, 8 * x.shape[3])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def twice(w, ALONG: gl.constexpr):
    """The half nearest to each number, in both halves of an integer."""
    x = w.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return gl.convert_layout(x | (x << 16), ALONG)


@gluon.jit
def in_columns(x, LAYOUT: gl.constexpr):
    """Pairs of halves [pages, dimensions, columns]  # [pages, (i, c, v), columns]"""
    x = halves(x).reshape(x.shape[0], 4, x.shape[1] // 4, 8, 2)  # c, i, column, v
    x = x.permute(0, 2, 1, 4, 3).reshape(x.shape[0], 8 * x.shape[2], 8)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def products(words, w):
    """Sums of weights [pages, dimensions] times codes as halves, of words [pages, 32, dimensions]  # [pages, tokens]"""
    PAGES: gl.constexpr = words.shape[0]
    RANKS: gl.constexpr = words.shape[2]
    C: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[PAGES, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, C, 2)
    WEIGHTS: gl.constexpr = layout_of_weights(PAGES, RANKS)
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, WEIGHTS)))[None, None, :]
    packed = twice(w, gl.SliceLayout(2, WEIGHTS))[:, :, None] & gl.where(column % 2 == 0, 0xFFFF, -65536)
    of_word = fours(words.reshape(PAGES, 8, 2, 2, RANKS).permute(0, 1, 4, 2, 3))
    even = gl.zeros([PAGES, 16, 8], gl.float32, C)
    odd = even
    for j in gl.static_range(4):
        b = in_columns(gl.where(column // 2 == j, packed, 0), B)
        even = gl.nvidia.ampere.mma_v2(codes_of(of_word[j], A), b, even)
        odd = gl.nvidia.ampere.mma_v2(codes_of(of_word[j] >> 8, A), b, odd)
    return gl.join(even, odd).reshape(PAGES, PAGE)  # half, r, j, v, u: as tokens are


# what is written -----------------------------------------------------------------------------------------------------


@gluon.jit
def in_order(x):
    """Integers in the order of floats, and back."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@gluon.jit
def log_sums(x):
    """The logarithms of sums of exponentials of each 128 of [pages, tokens]. Of a warp's integers one instruction finds
    the largest.
    """
    x = x.reshape(x.shape[0], 2, 32, 4)
    top = in_order(gl.max(x, 3).to(gl.int32, bitcast=True))
    top = in_order(gl.max(top, 2)).to(gl.float32, bitcast=True)
    top = gl.where(gl.abs(top) < float("inf"), top, 0.0) * LOG2E
    total = gl.sum(gl.sum(gl.exp2(x * LOG2E - top[:, :, None, None]), 3), 2)
    log = gl.inline_asm_elementwise(_LOG2, "=f,f", [total], dtype=gl.float32, is_pure=True, pack=1)
    return (top + log) * LN2


@gluon.jit
def leave_sample(SAMPLE, s, first, length):
    """Writes one of EACH tokens, `problem.sample_of`. A lane has one of its four tokens to write, or none."""
    PAGES: gl.constexpr = s.shape[0]
    a, b, c, d = fours(s.reshape(PAGES, PAGE // 4, 2, 2))
    ALONG: gl.constexpr = a.type.layout
    n = first + gl.arange(0, PAGES, gl.SliceLayout(1, ALONG))[:, None]
    four = gl.arange(0, PAGE // 4, gl.SliceLayout(0, ALONG))[None, :]
    run = n * (PAGE // EACH) + four // (EACH // 4)
    place = (run * STEP) & (EACH - 1)
    odd = (place & 1) == 1
    s = gl.where((place & 2) == 0, gl.where(odd, b, a), gl.where(odd, d, c))
    gl.store(SAMPLE + run, s, mask=(place >> 2 == four % (EACH // 4)) & (n * PAGE < length))


@gluon.jit
def leave_scores(SCORES, LSE, SAMPLE, x, base, inverse, first, length):
    """Writes scores, of pages as a whole, their sample, and the log-sum-exp of runs; x are `products`."""
    P: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    PAGES: gl.constexpr = x.shape[0]
    place = gl.arange(0, PAGE, gl.SliceLayout(0, x.type.layout))[None, :]
    worth = gl.where(place < PAGE // 2, 2.0**24, 2.0**20)
    s = gl.convert_layout(base, P)[:, None] + x * (gl.convert_layout(inverse, P)[:, None] * worth)
    n = first + gl.arange(0, PAGES, P)
    token = n[:, None] * PAGE + place
    gl.store(SCORES + token, s, mask=(n * PAGE < length)[:, None])
    leave_sample(SAMPLE, s, first, length)
    if (first + PAGES) * PAGE > length:
        s = gl.where(token < length, s, float("-inf"))
    of_runs = log_sums(s)
    n = first + gl.arange(0, PAGES, gl.SliceLayout(1, of_runs.type.layout))
    half = gl.arange(0, 2, gl.SliceLayout(0, of_runs.type.layout))
    gl.store(LSE + n[:, None] * 2 + half[None, :], of_runs, mask=(n * PAGE < length)[:, None])


# the kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def dims_of(DIMS, k, RANK: gl.constexpr):
    """The k-th dimensions, behind the last that one again: ends of others may be NaN, which 0 times is NaN, too."""
    if k.shape[0] > RANK:
        k = gl.minimum(k, RANK - 1)
    return gl.load(DIMS + k)


@gluon.jit(do_not_specialize=["pages", "parts"])
def score_tokens_sm90(
    Q, DIMS, COLUMNS, LEAST, LARGEST, TABLE, REQUEST, LENGTHS, SCORES, LSE, SAMPLE, of_page, of_head, table_row, pages,
    parts,
    HEADS: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr, DIM: gl.constexpr, PAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    WORDS: gl.constexpr = layout_of_words(PAGES, RANKS)
    ENDS: gl.constexpr = layout_of_ends(PAGES, RANKS)
    OF_PAGE: gl.constexpr = gl.SliceLayout(1, ENDS)

    # who am I
    h = gl.program_id(0) % HEADS
    part = gl.program_id(0) // HEADS % parts
    row = (gl.program_id(0) // HEADS // parts).to(gl.int64)
    if EARLY > 0:
        tl.extra.cuda.gdc_wait()  # for queries' parts; a compiled call may have lengths from a kernel behind that one
    r = row
    if REQUEST is not None:
        r = gl.load(REQUEST + row).to(gl.int64)
    length = gl.load(LENGTHS + row)
    first = part * PAGES
    n = first + gl.arange(0, PAGES, OF_PAGE)
    page = gl.load(TABLE + r * table_row + n, mask=n < pages, other=0)  # beside the length, not after it
    of_row = row * HEADS + h
    k = gl.arange(0, RANKS, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    dims = dims_of(DIMS + of_row * RANK, k, RANK)
    k = gl.arange(0, RANKS, gl.SliceLayout(0, ENDS))
    own_dims = dims_of(DIMS + of_row * RANK, k, RANK)
    q = gl.load(Q + of_row * RANK + k, mask=k < RANK, other=0.0)

    barrier()  # the compiler would put loads behind what depends on the length
    if first * PAGE >= length:
        return

    # all that is read
    page = gl.where(n * PAGE < length, page, 0).to(gl.int64)  # what tables say beyond may be anything
    ends = (page * of_page + h.to(gl.int64) * of_head)[:, None] + own_dims[None, :]
    page = gl.convert_layout(page, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)), assert_trivial=True)
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    at = ((page * HEADS + h) * (DIM * 32))[:, None, None] + dims[None, None, :] * 32 + word[None, :, None]
    words = gl.load(COLUMNS.to(gl.pointer_type(gl.int32), bitcast=True) + at)
    low = gl.load(LEAST + ends).to(gl.float32)
    high = gl.load(LARGEST + ends).to(gl.float32)

    # scores
    w, inverse, base = weights_of(q[None, :], low, high)
    tokens = pages.to(gl.int64) * PAGE
    leave_scores(
        SCORES + of_row * tokens, LSE + of_row * (tokens // 128), SAMPLE + of_row * (tokens // EACH),
        products(words, w), base, inverse, first, length,
    )  # fmt: skip
