"""Codes of keys and values (`tilewise.quant`) as factors of Hopper's products.

Codes of integers are multiplied as bytes: the other factor, queries or weights, is a number for each row times a byte
and a 254th of another, which are two columns of the product (`in_two`, `joined`). Codes of floats become 16-bit ones.

A product takes its first factor from registers where codes have to be rearranged. Threads load words of the codes that
they want next to each other and change them word by word; where that leaves another order than the product's, labels
move and numbers stay: columns of fp8 keys, with which queries are laid out alike (`permuted`), and the rows of a
product of values, which `dims_of_rows` names.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PART = gl.constexpr(254.0)  # the second byte counts so many parts of the first
MIDDLE = gl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, to even where two are as near


@gluon.jit
def rounded(x):
    return (x + MIDDLE) - MIDDLE


@gluon.jit
def in_two(x):
    """x [N, M] of absolute value 127 at most as two tensors of bytes: x is about first + second / PART."""
    first = rounded(x)
    second = rounded((x - first) * PART)
    return first.to(gl.int8), second.to(gl.int8)


@gluon.jit
def joined(product):
    """A product [N, 2 M] of bytes with pairs of columns as [N, M], in parts."""
    first, second = gl.split(product.reshape([product.shape[0], product.shape[1] // 2, 2]))
    return (first * 254 + second).to(gl.float32)


@gluon.constexpr_function
def _powers(first, end):
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def _first_factor(product, width):
    return gl.DotOperandLayout(0, product, width)


@gluon.constexpr_function
def _words_of_rows(rows, columns):
    """Registers of bytes [rows, columns]: a word's four are columns 4 t .. 4 t + 3 of sixteen, t in a quad."""
    registers = [[0, 1], [0, 2], [8, 0]]
    registers += [[0, n] for n in _powers(16, columns)] + [[n, 0] for n in _powers(64, rows)]
    return gl.DistributedLinearLayout(
        registers, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, columns]
    )


# integers ------------------------------------------------------------------------------------------------------------


_HALVES = (
    "{ .reg .b32 w; shl.b32 w, $2, 4; lop3.b32 $0, w, 0xF0F0F0F0, 0x80808080, 0x6A; "
    "lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; }"
)
HALVES = gl.constexpr(_HALVES)


@gluon.jit
def sixteenfold(codes):
    """(low, high) numbers of int4 bytes, times 16."""
    return gl.inline_asm_elementwise(HALVES, "=r,=r,r", [codes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def integer_keys(tile, KIND: gl.constexpr, PRODUCT: gl.constexpr):
    """K [keys, D] of a tile in shared memory, of int4 times 16, as the first factor of a PRODUCT."""
    if KIND == "int8":
        return tile
    else:
        N: gl.constexpr = tile.shape[0]
        C: gl.constexpr = tile.shape[1]
        low, high = sixteenfold(tile.load(_words_of_rows(N, C)))
        k = gl.join(low, high).permute((0, 2, 1)).reshape([N, 2 * C])
        return gl.convert_layout(k, _first_factor(PRODUCT, 4))


_TURN_4 = (
    "{ .reg .b32 a; .reg .b32 b; .reg .b32 c; .reg .b32 d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; "
    "prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; "
    "prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }"
)
_TURN_2 = "{ .reg .b32 a; prmt.b32 a, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531; mov.b32 $0, a; }"
TURN_4 = gl.constexpr(_TURN_4)
TURN_2 = gl.constexpr(_TURN_2)


@gluon.constexpr_function
def _words_of_columns(keys, columns):
    """Registers of bytes [keys, columns]: up to four columns, then four keys."""
    each = columns // 32
    registers = [[0, n] for n in _powers(1, min(each, 4))] + [[1, 0], [2, 0]]
    registers += [[0, n] for n in _powers(4, each)] + [[n, 0] for n in _powers(16, keys)]
    lanes = [[4, 0], [8, 0], [0, each], [0, 2 * each], [0, 4 * each]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8 * each], [0, 16 * each]], [], [keys, columns])


@gluon.jit
def load_integer_values(tile):
    """Bytes of a tile of values out of shared memory, as `integer_values` takes them."""
    return tile.load(_words_of_columns(tile.shape[0], tile.shape[1]))


@gluon.jit
def integer_values(codes, KIND: gl.constexpr, PRODUCT: gl.constexpr):
    """V^T [DV, keys], of int4 times 16, rows being what `dims_of_rows` says, as the first factor of a PRODUCT."""
    N: gl.constexpr = codes.shape[0]
    C: gl.constexpr = codes.shape[1]
    E: gl.constexpr = C // 32
    if E >= 4:  # words of four columns become words of four keys
        v = gl.inline_asm_elementwise(
            TURN_4, "=&r,=&r,=&r,=&r,r,r,r,r", [codes], dtype=codes.dtype, is_pure=True, pack=16
        )
        v = v.reshape([N // 4, 4, C // 4, 4]).permute((0, 3, 2, 1)).reshape([N, C])
    elif E == 2:
        v = gl.inline_asm_elementwise(TURN_2, "=&r,=&r,r,r", [codes], dtype=codes.dtype, is_pure=True, pack=8)
        v = v.reshape([N // 4, 2, 2, C // 2, 2]).permute((0, 2, 4, 3, 1)).reshape([N, C])
    else:
        v = codes
    if KIND == "int4":
        low, high = sixteenfold(v)
        v = gl.join(low, high).reshape([N, 4, 8, E, 2])
    else:
        v = v.reshape([N, 4, 8, E // 2, 2])
    v = v.permute((3, 1, 4, 2, 0)).reshape([v.shape[3] * 64, N])
    return gl.convert_layout(v, _first_factor(PRODUCT, 4))


# floats --------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _twice(bits):
    return f"0x{bits}{bits}"


@gluon.constexpr_function
def _floats_of_fp8(half):
    """Asm: of a word the 16-bit floats of bytes 0, 2, 1, 3. Their exponent begins higher."""
    shift, mask, factor, both = (4, "07F0", "7B80", "bf16x2") if half == "bf16" else (1, "3F80", "5C00", "f16x2")
    steps = "".join(
        f"shl.b32 w, $2, {8 * (1 - n)}; shr.b32 a, w, {shift}; and.b32 a, a, {_twice(mask)}; "
        f"lop3.b32 a, w, 0x80008000, a, 0xEA; mul.rn.{both} $n, a, b; ".replace("$n", f"${n}")
        for n in range(2)
    )
    return "{ .reg .b32 a; .reg .b32 b; .reg .b32 w; mov.b32 b, " + _twice(factor) + "; " + steps + "}"


@gluon.jit
def floats_of(codes, dtype: gl.constexpr):
    """fp8 as 16-bit floats: of each four that a thread has in a row, the second and the third have changed places."""
    HALF: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    return gl.inline_asm_elementwise(
        _floats_of_fp8(HALF), "=&r,=&r,r", [codes], dtype=dtype.value, is_pure=True, pack=4
    )


@gluon.jit
def load_float_keys(tile):
    """Bytes of a tile of keys out of shared memory, as `float_keys` takes them."""
    return tile.load(_words_of_rows(tile.shape[0], tile.shape[1]))


@gluon.jit
def float_keys(codes, dtype: gl.constexpr, PRODUCT: gl.constexpr):
    """K [keys, D], columns in the order of `permuted`, as the first factor of a PRODUCT."""
    N: gl.constexpr = codes.shape[0]
    D: gl.constexpr = codes.shape[1]
    k = floats_of(codes, dtype)
    k = k.reshape([N, D // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([N, D])
    return gl.convert_layout(k, _first_factor(PRODUCT, 2))


@gluon.jit
def permuted(q):
    """Queries [rows, D] with their columns in the order in which `float_keys` has the keys'."""
    R: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    return q.reshape([R, D // 16, 4, 2, 2]).permute((0, 1, 4, 2, 3)).reshape([R, D])


@gluon.constexpr_function
def _pairs_of_columns(keys, columns):
    """Registers of bytes [keys, columns]: a word's four are two columns of two keys."""
    registers = [[0, 1], [1, 0], [8, 0]]
    registers += [[n, 0] for n in _powers(16, keys)] + [[0, n] for n in _powers(64, columns)]
    return gl.DistributedLinearLayout(
        registers, [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [], [keys, columns]
    )


@gluon.jit
def load_float_values(tile):
    """Bytes of a tile of values out of shared memory, as `float_values` takes them."""
    return tile.load(_pairs_of_columns(tile.shape[0], tile.shape[1]))


@gluon.jit
def float_values(codes, dtype: gl.constexpr, PRODUCT: gl.constexpr):
    """V^T [DV, keys], rows being what `dims_of_rows` says, as the first factor of a PRODUCT."""
    N: gl.constexpr = codes.shape[0]
    C: gl.constexpr = codes.shape[1]
    v = floats_of(codes, dtype).reshape([N // 2, 2, C // 16, 8, 2]).permute((2, 1, 3, 0, 4)).reshape([C, N])
    return gl.convert_layout(v, _first_factor(PRODUCT, 2))


@gluon.jit
def dims_of_rows(row, KIND: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr):
    """The dimension that each of BLOCK rows of V^T is; DIM or more where it is none."""
    of_four = row % 64 // 16 * 8 + row % 8
    side = row % 16 // 8
    if KIND == "fp8":
        return row // 16 * 16 + row % 8 * 2 + side
    elif KIND == "int8":
        return of_four * (BLOCK // 32) + row // 64 * 2 + side
    else:
        column = of_four * (BLOCK // 64) + row // 64
        return gl.where(column < DIM // 2, side * (DIM // 2) + column, 256)
