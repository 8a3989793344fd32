"""Outputs of `gluon_sm90_codes`: sums of weights times codes of values, and what makes them numbers again."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewise.ops.attention.gluon_sm90_weight_codes import larger
from tilewise.tiles.gluon_api import async_store, barrier
from tilewise.tiles.hopper import matrix

APART = gl.constexpr(2.0**-64)  # how far below the largest scale of values so far sums may be counted from
LEAST = gl.constexpr(2.0**-126)  # and at all
INVERSE = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
TIMES = gl.constexpr("mul.f32 $0, $1, $2;")  # not pure, so that compilers do not do it whether or not it is asked for


@gluon.jit
def scale_of_values(codes, first, n, fixed):
    """Of a tile whose values have a scale of their own."""
    return gl.load(codes[2] + (first + n).to(gl.int64)) if fixed.value_blocks else 0 * n


@gluon.jit
def no_units(run):
    """`units_with` before any tile of values."""
    zero = (0 * run[0]).to(gl.float32)
    return zero + LEAST, zero, zero


@gluon.jit
def units_with(units, scale, fixed):
    """(unit in which the sum of outputs is counted from a tile of values with a scale of its own on, largest scale so
    far, by what the sum before is multiplied for that). The unit is that scale, but where that is so far below the
    largest that sums would leave float32. Zeros have the scale 0, and a tile with NaN makes all NaN.
    """
    if fixed.value_blocks:
        unit, most, _ = units
        most = larger(most, scale)
        after = larger(scale, larger(most * APART, LEAST))
        turn = unit * gl.inline_asm_elementwise(INVERSE, "=f,f", [after], dtype=gl.float32, is_pure=True, pack=1)
        return after, most, turn
    else:
        return units


@gluon.jit
def plus_output(acc, r, before, units, scale, fixed, ALWAYS: gl.constexpr = False):
    """Output with that of a tile, by which what came before is worth `before`. That a tile's output has another unit is
    so rare that it is asked for, but where a branch would spill.
    """
    earlier = gl.convert_layout(before, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    if fixed.value_blocks:
        unit, _, turn = units
        earlier = earlier * turn
        if ALWAYS:
            r = r * (scale / unit)
        else:
            if scale < unit:
                less = scale / unit + gl.zeros_like(r)
                r = gl.inline_asm_elementwise(TIMES, "=f,f,f", [r, less], dtype=gl.float32, is_pure=False, pack=1)
    return acc * earlier[:, None] + r


@gluon.jit
def put_output(O, where, out, acc, factor, share, of_values, fixed, FIRST: gl.constexpr):
    """Write the channels from FIRST on of 64 rows, by way of `out` in shared memory: sums times `factor` and a value's
    scale, and the mean of values, of which a row has `share`.
    """
    V_SCALE, V_MEAN, of_head, unit = of_values
    channel = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    inside = channel < fixed.head_dim_v
    if fixed.value_blocks:
        x = acc * factor[:, None] * unit  # one after the other: their product may be too small
    else:
        x = acc * factor[:, None] * gl.load(V_SCALE + of_head + channel, mask=inside, other=0.0)[None, :]
    if fixed.centred:
        x += gl.load(V_MEAN + of_head + channel, mask=inside, other=0.0)[None, :] * share[:, None]
    o = x.to(out.dtype)
    tma.store_wait(0)  # of what was there before
    barrier()
    matrix(out).store(o)
    fence_async_shared()
    barrier()
    async_store(O, [where[0], where[1], where[2], where[3], FIRST], out)
