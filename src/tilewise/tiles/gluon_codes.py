"""Codes of keys and values (`tilewise.quant`) as factors of Hopper's products, which take bytes.

The other factor, queries or weights, is several bytes for each number, columns of the product that are added
afterwards: of integers a byte and 254ths of another, of fp8 codes in each a sixteenth of the one before (`in_two`,
`in_four`; `of_two`, `of_four`).

A product takes its first factor from registers where codes have to be rearranged. Threads load words of the codes that
they want next to each other and change them word by word; where that leaves another order than the product's, labels
move and numbers stay: rows of a product of values are those that `dims_of_rows` names.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.tiles.gluon_api import as_pairs

MIDDLE = gl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, to even where two are as near


@gluon.constexpr_function
def part_of(KIND):
    """How many of a second byte are one of the first."""
    return 16.0 if KIND == "fp8" else 254.0


@gluon.constexpr_function
def largest_of(KIND):
    """What a first byte may be at most."""
    return 448.0 if KIND == "fp8" else 127.0


@gluon.jit
def _byte(x, KIND: gl.constexpr):
    """(the nearest code, what it stands for)"""
    if KIND == "fp8":  # rounded here: ptxas (CUDA 12.9) loses codes that are both put in words and read again
        number = ((x.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)
        return number.to(gl.float8e4nv), number
    else:
        sum = x + MIDDLE
        return sum.to(gl.int32, bitcast=True).to(gl.int8), sum - MIDDLE


@gluon.jit
def _joined(first, second):
    """[N, M] twice as [N, 2 M], in turn."""
    return gl.join(first, second).reshape([first.shape[0], 2 * first.shape[1]])


@gluon.jit
def in_two(x, KIND: gl.constexpr):
    """x [N, M], up to `largest_of`, as two tensors of bytes."""
    first, number = _byte(x, KIND)
    second, _number = _byte((x - number) * part_of(KIND), KIND)
    return first, second


@gluon.jit
def in_columns(x, KIND: gl.constexpr):
    """x [N, M] as bytes [N, 2 M], the two of a number side by side."""
    first, second = in_two(x, KIND)
    return _joined(first, second)


@gluon.jit
def in_rows(x, KIND: gl.constexpr):
    """Queries x [R, D] as bytes [2 R, D], the two of a row one under the other; of fp8 two more below [4 R, D]."""
    R: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    first, number = _byte(x, KIND)
    rest = (x - number) * part_of(KIND)
    second, number = _byte(rest, KIND)
    rows = gl.join(first, second).permute((0, 2, 1)).reshape([2 * R, D])
    if KIND == "fp8":
        third, fourth = in_two((rest - number) * part_of(KIND), KIND)
        below = gl.join(third, fourth).permute((0, 2, 1)).reshape([2 * R, D])
        rows = gl.join(rows, below).permute((2, 0, 1)).reshape([4 * R, D])
    return rows


@gluon.jit
def of_columns(product, KIND: gl.constexpr):
    """A product [N, 2 M] with a factor `in_columns` as [N, M]; of integers times `part_of`."""
    first, second = gl.split(product.reshape([product.shape[0], product.shape[1] // 2, 2]))
    if KIND == "fp8":
        return first + second * (1.0 / part_of(KIND))
    else:
        return (first * 254 + second).to(gl.float32)


@gluon.jit
def of_rows(product, KIND: gl.constexpr):
    """A product with queries `in_rows` [N, columns] as [N, R]; of integers times `part_of`."""
    found = of_columns(product, KIND)
    if KIND == "fp8":
        above, below = gl.split(found.reshape([found.shape[0], 2, found.shape[1] // 2]).permute((0, 2, 1)))
        found = above + below * (1.0 / (part_of(KIND) * part_of(KIND)))
    return found


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
def key_factor(tile, KIND: gl.constexpr, PRODUCT: gl.constexpr):
    """K [keys, D] of a tile in shared memory, of int4 times 16, as the first factor of a PRODUCT."""
    if KIND != "int4":
        return tile
    else:
        N: gl.constexpr = tile.shape[0]
        C: gl.constexpr = tile.shape[1]
        low, high = sixteenfold(tile.load(_words_of_rows(N, C)))
        k = gl.join(low, high).permute((0, 2, 1)).reshape([N, 2 * C])
        return gl.convert_layout(k, _first_factor(PRODUCT, 4))


_BYTES_OF_PAIRS = "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;"
BYTES_OF_PAIRS = gl.constexpr(_BYTES_OF_PAIRS)


@gluon.constexpr_function
def _pairs_of_keys(keys, pairs):
    """Registers of pairs of bytes [keys, pairs]: words of two keys, such as matrices that are loaded transposed have.
    Keys that are one after the other in `by_places` lie in registers, then in a quad's threads.
    """
    if keys == 64:
        registers, quad = [[8, 0], [1, 0]], [[2, 0], [4, 0]]
    else:
        registers, quad = [[8, 0], [64, 0], [4, 0]], [[1, 0], [2, 0]]
    registers += [[n, 0] for n in _powers(16, keys) if n != 64] + [[0, n] for n in _powers(32, pairs)]
    return gl.DistributedLinearLayout(registers, [*quad, [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [keys, pairs])


@gluon.jit
def by_places(x):
    """x [keys, M] in the order that keys have as columns of weights and of V^T: what a thread has of a product of keys
    comes one after the other.
    """
    N: gl.constexpr = x.shape[0]
    if N == 64:
        return x.reshape([4, 2, 4, 2, x.shape[1]]).permute((0, 2, 3, 1, 4)).reshape([N, x.shape[1]])
    else:
        return x.reshape([N // 128, 2, 4, 2, 8, x.shape[1]]).permute((0, 2, 4, 1, 3, 5)).reshape([N, x.shape[1]])


@gluon.jit
def load_values(tile):
    """Pairs of bytes of a tile of values [keys, columns] out of shared memory, as `value_factor` takes them."""
    pairs = as_pairs(tile)
    return pairs.load(_pairs_of_keys(pairs.shape[0], pairs.shape[1]))


@gluon.jit
def value_factor(pairs, KIND: gl.constexpr, PRODUCT: gl.constexpr):
    """V^T [DV, keys], of int4 times 16, as the first factor of a PRODUCT: columns are `by_places`, rows what
    `dims_of_rows` says.
    """
    N: gl.constexpr = pairs.shape[0]
    PAIRS: gl.constexpr = pairs.shape[1]
    first, second = gl.inline_asm_elementwise(
        BYTES_OF_PAIRS, "=&r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    if KIND == "int4":
        low, high = sixteenfold(first)
        low_of_second, high_of_second = sixteenfold(second)
        v = gl.join(gl.join(low, low_of_second), gl.join(high, high_of_second))
        v = by_places(v.reshape([N, 4 * PAIRS]))
        v = v.reshape([N, PAIRS // 32, 4, 8, 2, 2]).permute((1, 4, 2, 5, 3, 0)).reshape([4 * PAIRS, N])
    else:
        v = by_places(gl.join(first, second).reshape([N, 2 * PAIRS]))
        v = v.reshape([N, PAIRS // 32, 4, 8, 2]).permute((1, 2, 4, 3, 0)).reshape([2 * PAIRS, N])
    v = v.to(gl.float8e4nv if KIND == "fp8" else gl.int8, bitcast=True)
    return gl.convert_layout(v, _first_factor(PRODUCT, 4), assert_trivial=True)


@gluon.jit
def dims_of_rows(row, KIND: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr):
    """The dimension that each of BLOCK rows of V^T is; DIM or more where it is none."""
    pair = row % 64 // 16 * 8 + row % 8
    side = row % 16 // 8
    if KIND != "int4":
        return 2 * (row // 64 * 32 + pair) + side
    else:
        column = 2 * (row // 128 * 32 + pair) + row // 64 % 2
        return gl.where(column < DIM // 2, side * (DIM // 2) + column, BLOCK)
