"""The helpers of `arithmetic`, for formulas emitted as Gluon source."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def decoded(x):
    """An integer that travelled in a tuple (see `formula.emit.encoded`)."""
    return x >> 2


@gluon.jit
def wide(x):
    return x.to(gl.int64)


@gluon.jit
def as_int(x):
    """A captured integer, wide enough to compute with: 32 or 64 bits."""
    return x.to(gl.int32) if x.dtype.primitive_bitwidth < 32 else x


@gluon.jit
def to_float(x):
    return x.to(gl.float32)


@gluon.jit
def to_int(x):
    return x.to(gl.int64)


@gluon.jit
def floordiv(a, b):
    q = a // b
    return gl.where((q * b != a) & ((a < 0) != (b < 0)), q - 1, q)


@gluon.jit
def mod(a, b):
    r = a % b
    return gl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@gluon.jit
def float_mod(a, b):
    r = a % b
    return gl.where((r != 0.0) & ((r < 0.0) != (b < 0.0)), r + b, r)


@gluon.jit
def float_floordiv(a, b):
    q = gl.div_rn(a - float_mod(a, b), b)  # whole but for its rounding
    whole = gl.floor(q)
    whole = gl.where(q - whole > 0.5, whole + 1.0, whole)
    return gl.where(b == 0.0, a / b, whole)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(-x * LOG2E))


@gluon.jit
def tanh(x):
    # the second form cancels near 0, where the first, a minimax polynomial (Cephes, tanhf), is exact to 2 ulp
    z = x * x
    series = -5.70498872745e-3
    series = series * z + 2.06390887954e-2
    series = series * z - 5.37397155531e-2
    series = series * z + 1.33314422036e-1
    series = series * z - 3.33332819422e-1
    near = series * z * x + x
    far = 1.0 - 2.0 / (gl.exp2(2.0 * LOG2E * x) + 1.0)
    return gl.where(gl.abs(x) < 0.625, near, far)


@gluon.jit
def tanh_fast(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid_fast(x):
    return 0.5 + 0.5 * tanh_fast(0.5 * x)
