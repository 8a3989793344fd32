"""The products of `gluon_sm90_codes`: scores of codes, and weights that become codes where they are times values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.tiles.hopper import parts_of, product_layout

DEPTH = gl.constexpr(32)  # numbers of 8 bits that a product takes at a time


@gluon.jit
def scores_of(q, k):
    """Start the product of 64 queries with a tile of keys [BLOCK_N, D]: int32 of int8, else float32."""
    BLOCK_N: gl.constexpr = k.shape[0]
    SUM: gl.constexpr = gl.int32 if k.dtype == gl.int8 else gl.float32
    zeros = gl.zeros([64, BLOCK_N], SUM, layout=product_layout(BLOCK_N, DEPTH))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.constexpr_function
def _as_operand(columns, width):
    """Registers of four bytes of a weights' operand [64, columns]: [64, columns / 16, 4]."""
    return gl.DotOperandLayout(0, product_layout(width, DEPTH), 4)


_PACK = (
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 $0, {a, b}; }"
)
PACK = gl.constexpr(_PACK)


@gluon.jit
def packed_weights(w):
    """Weights [64, N / 8, 4, 2] as FP8, four of a thread in an int32 [64, N / 16, 4]: a loop that carried FP8 would
    take them apart, byte by byte. Of every 16 keys a thread has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, as
    `quant.blocks.KEY_ORDER` says.
    """
    EIGHTS: gl.constexpr = w.shape[1]
    y = gl.permute(w.reshape([64, EIGHTS // 2, 2, 4, 2]), (0, 1, 3, 2, 4))
    a, b = gl.split(y)
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return gl.inline_asm_elementwise(PACK, "=r,f,f,f,f", [a0, b0, a1, b1], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def operand_of(p, WIDTH: gl.constexpr):
    """Packed weights as the left operand of a product [64, WIDTH]."""
    N: gl.constexpr = p.shape[1] * 16
    OPERAND: gl.constexpr = _as_operand(N, WIDTH)
    BYTES: gl.constexpr = gl.zeros([64, N], gl.float32, layout=OPERAND).reshape([64, N // 16, 4, 4]).type.layout
    x = gl.convert_layout(p, gl.SliceLayout(3, BYTES), assert_trivial=True)[:, :, :, None]
    x = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r,r,r",
        [x + gl.zeros([64, N // 16, 4, 4], gl.int32, layout=BYTES)],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )
    return gl.convert_layout(x.reshape([64, N]), OPERAND, assert_trivial=True)


@gluon.jit
def product_of(p, v):
    """Start packed weights times a tile of values [D, N]."""
    D: gl.constexpr = v.shape[0]
    zeros = gl.zeros([64, D], gl.float32, layout=product_layout(D, DEPTH))
    return warpgroup_mma(operand_of(p, D), v.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def output_of(p, v, ones, fixed):
    """Start (weights times a tile of values [D, N], their sums) of packed weights."""
    r = product_of(p, v)
    sums = gl.zeros([64, 8], gl.float32, layout=product_layout(8, DEPTH))
    if not fixed.exact_sums:
        sums = warpgroup_mma(operand_of(p, 8), ones.permute((1, 0)), sums, use_acc=False, is_async=True)
    return r, sums


@gluon.jit
def finished(r, sums, LEFT: gl.constexpr, fixed):
    """What `output_of` started, once no more than LEFT products are under way."""
    if fixed.exact_sums:
        r = warpgroup_mma_wait(LEFT, deps=(r,))
    else:
        r, sums = warpgroup_mma_wait(LEFT, deps=(r, sums))
    return r, sums


@gluon.jit
def of_thread(sums, like):
    """Sums [64, 8], whose columns are all the same, as `like` [64, 4] has a number for each thread of a quad."""
    return gl.convert_layout(gl.max(gl.max(parts_of(sums), 3), 1), like.type.layout, assert_trivial=True)
