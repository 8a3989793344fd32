"""Thresholds of top-k and top-p on a GPU, without a sort: a program goes through a row several times.

Logits become integers of the same order. The k-th largest is found eight bits at a time by counting; the one at which
probabilities add up to top_p two bits at a time, by sums of what is at and above each of three. Sums are taken in one
order, so that a row's threshold repeats, and depends on no other row.
"""

import triton
import triton.language as tl

from tilewise.ops.sampling.problem import GREEDY_BELOW
from tilewise.tiles.arithmetic import LOG2E

COLD = tl.constexpr(GREEDY_BELOW)
LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(x):
    """Integers without sign in the order of numbers, uint32."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # both zeros are equal
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def number_at(key):
    """The number of `ordered`."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def kept(y, column, TEMPERATURE, MIN_P, LEAST, LAST, TOP, row):
    """Processed logits of a row, [n], -inf where top-k, top-p and min-p leave them out."""
    least = tl.load(LEAST + row).to(tl.uint32, bitcast=True)
    key = ordered(y)
    keep = (key > least) | ((key == least) & (column <= tl.load(LAST + row)))
    if MIN_P is not None:
        t = 1.0 if TEMPERATURE is None else tl.load(TEMPERATURE + row)
        floor = tl.load(TOP + row) + tl.maximum(t, COLD) * tl.log(tl.load(MIN_P + row))
        keep = keep & ((y >= floor) | (t < COLD))
    return tl.where(keep, y, float("-inf"))


@triton.jit
def key_of(y, column, width):
    """Keys of logits, 0 behind the last column."""
    return tl.where(column < width, ordered(y), 0)


@triton.jit
def count_least(Y, width, k, CHUNK: tl.constexpr):
    """(The k-th largest key of a row, how many of those with this key are among the k)"""
    last = tl.full([], 0, tl.uint32)
    missing = k
    digits = tl.arange(0, 256)
    shift = 32
    while shift > 0:
        shift -= 8
        counts = tl.zeros([256], tl.int32)
        for start in range(0, width, CHUNK):
            column = start + tl.arange(0, CHUNK)
            key = key_of(tl.load(Y + column, mask=column < width, other=0.0), column, width)
            digit = (key ^ last) >> shift  # below 256 where the bits before are alike, and `last` has none here yet
            counts += tl.histogram((digit & 255).to(tl.int32), 256, mask=(column < width) & (digit < 256))
        found = tl.sum((tl.cumsum(counts, 0, reverse=True) >= missing).to(tl.int32), 0) - 1
        missing -= tl.sum(tl.where(digits > found, counts, 0), 0)
        last = last | (found.to(tl.uint32) << shift)
    return last, missing


@triton.jit
def masses(Y, width, top, inv_t, least, a, b, c, CHUNK: tl.constexpr):
    """Sums of weights exp((y - top) / temperature) with a key above `least` and not below a, b and c."""
    sum_a = tl.zeros([CHUNK], tl.float32)
    sum_b = tl.zeros([CHUNK], tl.float32)
    sum_c = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        y = tl.load(Y + column, mask=column < width, other=0.0)
        key = key_of(y, column, width)
        weight = tl.where(key > least, tl.math.exp2((y - top) * inv_t * LOG2E), 0.0)
        sum_a += tl.where(key >= a, weight, 0.0)
        sum_b += tl.where(key >= b, weight, 0.0)
        sum_c += tl.where(key >= c, weight, 0.0)
    return tl.sum(sum_a, 0), tl.sum(sum_b, 0), tl.sum(sum_c, 0)


@triton.jit
def mass_least(Y, width, top, inv_t, p, least, ties, CHUNK: tl.constexpr):
    """(The key at which weights add up to p of all, how many of those with this key it takes); of keys from `least` on,
    and of that one `ties`.
    """
    tied = ties.to(tl.float32) * tl.math.exp2((number_at(least) - top) * inv_t * LOG2E)
    tied = tl.where(least > 0, tied, 0.0)
    none = tl.full([], 0, tl.uint32)
    total, _, _ = masses(Y, width, top, inv_t, least, none, none, none, CHUNK)
    enough = tl.maximum(p * (total + tied), 1e-30)
    last = tl.full([], 0, tl.uint32)
    shift = 32
    while shift > 0:
        shift -= 2
        step = tl.full([], 1, tl.uint32) << shift
        a, b, c = last | step, last | (step * 2), last | (step * 3)
        at_a, at_b, at_c = masses(Y, width, top, inv_t, least, a, b, c, CHUNK)
        at_a += tl.where(a <= least, tied, 0.0)
        at_b += tl.where(b <= least, tied, 0.0)
        at_c += tl.where(c <= least, tied, 0.0)
        last = tl.where(at_c >= enough, c, tl.where(at_b >= enough, b, tl.where(at_a >= enough, a, last)))
    above, _, _ = masses(Y, width, top, inv_t, tl.maximum(least, last), none, none, none, CHUNK)
    equal = tl.zeros([CHUNK], tl.int32)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        key = key_of(tl.load(Y + column, mask=column < width, other=0.0), column, width)
        equal += (key == last).to(tl.int32)
    most = tl.where(last == least, ties, tl.sum(equal, 0))
    weight = tl.math.exp2((number_at(last) - top) * inv_t * LOG2E)
    number = tl.math.ceil(tl.minimum((enough - above) / weight, 1e9)).to(tl.int32)
    return last, tl.minimum(tl.maximum(number, 1), most)


@triton.jit
def column_at(Y, width, least, ties, CHUNK: tl.constexpr):
    """The column of the key `least` up to which there are `ties` of them."""
    found = tl.full([], LARGEST, tl.int32)
    before = tl.full([], 0, tl.int32)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        key = key_of(tl.load(Y + column, mask=column < width, other=0.0), column, width)
        equal = ((key == least) & (column < width)).to(tl.int32)
        here = tl.sum(equal, 0)
        if (before < ties) & (before + here >= ties):
            at = (tl.cumsum(equal, 0) + before == ties) & (equal > 0)
            found = tl.min(tl.where(at, column, LARGEST), 0)
        before += here
    return found


@triton.jit
def find_thresholds(Y, TEMPERATURE, TOP_K, TOP_P, LEAST, LAST, TOP, width, CHUNK: tl.constexpr):
    """Of a row of processed logits: the least key that top-k and top-p keep, the last column of those that have it, and
    the largest logit. A row that keeps all has key 0, which no logit has.
    """
    # who am I
    row = tl.program_id(0).to(tl.int64)
    Y += row * width
    t = 1.0 if TEMPERATURE is None else tl.load(TEMPERATURE + row)
    inv_t = 1.0 / tl.maximum(t, COLD)
    largest = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        largest = tl.maximum(largest, tl.load(Y + column, mask=column < width, other=float("-inf")))
    top = tl.max(largest, 0)
    draws = (t >= COLD) & (tl.abs(top) < float("inf"))

    least = tl.full([], 0, tl.uint32)
    ties = tl.full([], 0, tl.int32)
    if TOP_K is not None:
        k = tl.load(TOP_K + row)
        if draws & (k > 0) & (k < width):
            least, ties = count_least(Y, width, k, CHUNK)
    if TOP_P is not None:
        p = tl.load(TOP_P + row)
        if draws & (p < 1.0):
            least, ties = mass_least(Y, width, top, inv_t, p, least, ties, CHUNK)
    last = tl.full([], LARGEST, tl.int32)
    if least > 0:
        last = column_at(Y, width, least, ties, CHUNK)
    tl.store(LEAST + row, least.to(tl.int32, bitcast=True))
    tl.store(LAST + row, last)
    tl.store(TOP + row, top)
