"""Scalar and elementwise helpers that emitted formulas call, in Triton kernels and in Gluon ones, and a step of online
softmax.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST_LSE = tl.constexpr(2.0**22)
LARGE_SCORE = tl.constexpr(2.0**27)


@triton.jit
def decoded(x):
    """An integer that travelled in a tuple (see `formula.emit.encoded`)."""
    return x >> 2


@triton.jit
def wide(x):
    """Promote an index to 64 bits: positions times strides may pass 2**31."""
    return x.to(tl.int64)


@triton.jit
def as_int(x):
    """A captured integer, wide enough to compute with: 32 or 64 bits."""
    return x.to(tl.int32) if x.dtype.primitive_bitwidth < 32 else x


@triton.jit
def to_float(x):
    return x.to(tl.float32)


@triton.jit
def to_int(x):
    return x.to(tl.int64)


@triton.jit
def floordiv(a, b):
    """Division rounding down, as Python and PyTorch do; the hardware rounds toward zero."""
    q = a // b
    return tl.where((q * b != a) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def mod(a, b):
    """Remainder with the sign of the divisor, as Python and PyTorch do."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def shift_left(a, b):
    """a shifted by b bits, both of 64: by less than 0 or more than 63, all are gone, as in PyTorch."""
    inside = (b >= 0) & (b < 64)
    return tl.where(inside, a << tl.where(inside, b, 0), 0)


@triton.jit
def shift_right(a, b):
    """a shifted by b bits, both of 64: by less than 0 or more than 63, the sign is left, as in PyTorch."""
    return a >> tl.where((b >= 0) & (b < 64), b, 63)


@triton.jit
def float_mod(a, b):
    """Remainder of floats with the sign of the divisor, exact."""
    r = a % b
    return tl.where((r != 0.0) & ((r < 0.0) != (b < 0.0)), r + b, r)


@triton.jit
def float_floordiv(a, b):
    """Division of floats rounding down, as PyTorch does: exact, not the floor of a rounded quotient."""
    q = tl.div_rn(a - float_mod(a, b), b)  # whole but for its rounding
    whole = tl.floor(q)
    whole = tl.where(q - whole > 0.5, whole + 1.0, whole)
    return tl.where(b == 0.0, a / b, whole)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def tanh(x):
    # the second form cancels near 0, where the first, a minimax polynomial (Cephes, tanhf), is exact to 2 ulp
    z = x * x
    series = -5.70498872745e-3
    series = series * z + 2.06390887954e-2
    series = series * z - 5.37397155531e-2
    series = series * z + 1.33314422036e-1
    series = series * z - 3.33332819422e-1
    near = series * z * x + x
    far = 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * x) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def tanh_fast(x):
    """The hardware's tanh (sm_75 and newer): one instruction, relative error 2**-11, below the rounding of a 16-bit
    score.
    """
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid_fast(x):
    return 0.5 + 0.5 * tanh_fast(0.5 * x)


@triton.jit
def unit_of_row(m, c):
    """What the difference of a score and the row's maximum m is multiplied by: c, or 1 where float32 has no other score
    within 16 of m. The compiler subtracts m * c, rounded, from s * c, which is not: of such m by a power of 2 too much.
    """
    return tl.where(tl.abs(m) > LARGE_SCORE, 1.0, c)


@triton.jit
def weights_of(s, m_i, m_use, c, SCORE: tl.constexpr):
    """(Weights of scores [ROWS, KEYS] from the maxima m_use on, the factor of what was weighted from m_i on before)."""
    if SCORE is not None:
        unit = unit_of_row(m_use, c)
        p = tl.math.exp2(s * unit[:, None] - (m_use * unit)[:, None])
        alpha = tl.math.exp2((m_i - m_use) * unit)
    else:
        p = tl.math.exp2(s * c - (m_use * c)[:, None])
        alpha = tl.math.exp2((m_i - m_use) * c)
    return p, alpha


@triton.jit
def has_no_gradient(lse):
    """Whether a row's scores are so large that their log-sum does not tell one sum from another twice as large: no
    weight is made of it.
    """
    return (tl.abs(lse) > LARGEST_LSE) & (tl.abs(lse) < float("inf"))


@triton.jit
def lse_of_weights(lse, unit):
    """What a backward subtracts from a row's scores before it takes their powers: lse * unit; 0 where the row sees
    nothing, whose scores are -inf; infinite where it has no gradient.
    """
    scaled = tl.where(lse == float("-inf"), 0.0, lse * unit)
    return tl.where(has_no_gradient(lse), float("inf"), scaled)


@triton.jit
def power_below(x, top):
    """2**(x - top), for x up to top; 1 where they are equal, though the compiler may take x before it was rounded."""
    return tl.math.exp2(tl.where(x == top, 0.0, x - top))


@triton.jit
def softmax_step(s, m_i, l_i):
    """Scores [ROWS, KEYS] of one more tile, -inf for what is hidden: (largest, sums, weights, the factor of what was
    weighted before). Rows that have seen nothing weigh nothing.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    w = tl.math.exp2((s - m_use[:, None]) * LOG2E)
    alpha = tl.math.exp2((m_i - m_use) * LOG2E)
    return m_new, l_i * alpha + tl.sum(w, 1), w, alpha


@triton.jit
def known_multiple(n, ALIGN: tl.constexpr):
    """n as it is, written so that the compiler sees ALIGN divide it, and loads vectors."""
    return n // ALIGN * ALIGN
