"""Codes of keys and values (`tilewise.quant`) as the first factor of Hopper's products, taken from registers.

A thread loads words of the four codes that it wants next to each other, and arithmetic on two 16-bit numbers at a time
makes floats of a word's first and third byte and of its second and fourth. Where this is another order than the
product's, labels move and numbers stay: queries have their columns in the order of the keys' (`permuted`), and the rows
of a product of values are those that `dims_of_rows` names.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _twice(bits):
    return f"0x{bits}{bits}"


@gluon.constexpr_function
def _floats(kind, half, word, out):
    """Asm: `out`, two floats of what `word` has in the low bits of its halves (fp8: in the high bits)."""
    bf16 = half == "bf16"
    both = "bf16x2" if bf16 else "f16x2"
    if kind == "int8" and bf16:  # 128 + seven bits, less 128 or 256
        return (
            f"lop3.b32 a, {word}, 0x007F007F, 0x43004300, 0x6A; lop3.b32 b, {word}, 0x00800080, 0x43004300, 0x6A; "
            f"sub.rn.bf16x2 {out}, a, b; "
        )
    if kind == "fp8":  # its exponent begins lower
        shift, mask, factor = (4, "07F0", "7B80") if bf16 else (1, "3F80", "5C00")
        return (
            f"shr.b32 a, {word}, {shift}; and.b32 a, a, {_twice(mask)}; lop3.b32 a, {word}, 0x80008000, a, 0xEA; "
            f"mov.b32 b, {_twice(factor)}; mul.rn.{both} {out}, a, b; "
        )
    # bits of a float whose neighbours are 1 apart, less what it stands for
    mask, start, less = ("000F", "4300", "C308") if bf16 else ("000F", "6400", "E408")
    if kind == "int8":
        mask, start, less = "00FF", "6480", "E480"
    return (
        f"lop3.b32 a, {word}, {_twice(mask)}, {_twice(start)}, 0x6A; mov.b32 b, {_twice(less)}; "
        f"add.rn.{both} {out}, a, b; "
    )


@gluon.constexpr_function
def _unpack(kind, half):
    """Asm: of a word the floats of bytes 0, 2, 1, 3; of int4 first of all low bits, then of all high ones."""
    outs = 4 if kind == "int4" else 2
    steps = []
    for n in range(outs):
        shift = {"int4": f"shr.b32 w, ${outs}, {(0, 8, 4, 12)[n]};", "int8": f"shr.b32 w, ${outs}, {8 * n};"}
        shift["fp8"] = f"shl.b32 w, ${outs}, {8 * (1 - n)};"
        steps.append(f"{shift[kind]} {_floats(kind, half, 'w', f'${n}')}")
    return "{ .reg .b32 a; .reg .b32 b; .reg .b32 w; " + "".join(steps) + "}"


@gluon.jit
def floats_of(codes, KIND: gl.constexpr, dtype: gl.constexpr):
    """Codes as floats, a tensor of them or of int4 two (low and high bits): of each four that a thread has in a row,
    the second and the third have changed places.
    """
    HALF: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    if KIND == "int4":
        return gl.inline_asm_elementwise(
            _unpack(KIND, HALF), "=r,=r,=r,=r,r", [codes], dtype=(dtype.value, dtype.value), is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(_unpack(KIND, HALF), "=r,=r,r", [codes], dtype=dtype.value, is_pure=True, pack=4)


@gluon.constexpr_function
def _powers(first, end):
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def _first_factor(rows, like):
    """The layout of a product's first factor [rows, ...], of `like` the accumulator's columns and warps."""
    columns, warps = like
    parent = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])
    return gl.DotOperandLayout(0, parent, 2)


# keys ----------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _layout_of_keys(keys, columns, warps):
    """Registers of bytes [keys, columns]: a word's four are columns 4 t .. 4 t + 3 of sixteen, t in a quad."""
    registers = [[0, 1], [0, 2], [8, 0]]
    registers += [[0, n] for n in _powers(16, columns)] + [[n, 0] for n in _powers(16 * warps, keys)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[n, 0] for n in _powers(16, 16 * warps)], [], [keys, columns])


@gluon.jit
def load_keys(tile, WARPS: gl.constexpr):
    """Bytes of a tile of keys out of shared memory, as `keys_of` takes them."""
    return tile.load(_layout_of_keys(tile.shape[0], tile.shape[1], WARPS))


@gluon.jit
def keys_of(codes, KIND: gl.constexpr, dtype: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr):
    """Bytes as K [keys, D], columns in the order of `permuted`, for a product of R columns by WARPS warps."""
    N: gl.constexpr = codes.shape[0]
    C: gl.constexpr = codes.shape[1]
    if KIND == "int4":
        low, high = floats_of(codes, KIND, dtype)
        k = gl.join(low, high).permute((0, 2, 1)).reshape([N, 2 * C])
    else:
        k = floats_of(codes, KIND, dtype)
    D: gl.constexpr = k.shape[1]
    k = k.reshape([N, D // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([N, D])
    return gl.convert_layout(k, _first_factor(N, (R, WARPS)))


@gluon.jit
def permuted(q):
    """Queries [rows, D] with their columns in the order in which `keys_of` has the keys'."""
    R: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    return q.reshape([R, D // 16, 4, 2, 2]).permute((0, 1, 4, 2, 3)).reshape([R, D])


# values --------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _layout_of_values(keys, columns, kind, warps):
    """Registers of bytes [keys, columns]: a word's four are two columns of two keys, of int4 four keys of a column."""
    if kind == "int4":
        registers, lanes = [[8, 0], [1, 0]], [[0, 1], [0, 2], [0, 4]]
        warp, step = [[0, n] for n in _powers(8, 8 * warps)], 8 * warps
    else:
        registers, lanes = [[0, 1], [1, 0], [8, 0]], [[0, 2], [0, 4], [0, 8]]
        warp, step = [[0, n] for n in _powers(16, 16 * warps)], 16 * warps
    registers += [[n, 0] for n in _powers(16, keys)] + [[0, n] for n in _powers(step, columns)]
    return gl.DistributedLinearLayout(registers, [[2, 0], [4, 0], *lanes], warp, [], [keys, columns])


@gluon.jit
def load_values(tile, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Bytes of a tile of values out of shared memory, as `values_of` takes them."""
    return tile.load(_layout_of_values(tile.shape[0], tile.shape[1], KIND, WARPS))


@gluon.jit
def values_of(codes, KIND: gl.constexpr, dtype: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr):
    """Bytes as V^T [DV, keys], row n being what `dims_of_rows` says, for a product of R columns by WARPS warps."""
    N: gl.constexpr = codes.shape[0]
    C: gl.constexpr = codes.shape[1]
    if KIND == "int4":
        low, high = floats_of(codes, KIND, dtype)
        v = gl.join(low, high).reshape([N // 16, 2, 4, 2, C // 8, 8, 2]).permute((4, 6, 5, 0, 3, 2, 1))
        v = v.reshape([2 * C, N])
    else:
        v = floats_of(codes, KIND, dtype).reshape([N // 2, 2, C // 16, 8, 2]).permute((2, 1, 3, 0, 4))
        v = v.reshape([C, N])
    return gl.convert_layout(v, _first_factor(C, (R, WARPS)))


@gluon.jit
def dims_of_rows(row, KIND: gl.constexpr, DIM: gl.constexpr):
    """The dimension that each row of V^T is; DIM or more where it is none."""
    if KIND == "int4":
        column = row // 16 * 8 + row % 8
        return gl.where(column < DIM // 2, row % 16 // 8 * (DIM // 2) + column, 256)
    else:
        return row // 16 * 16 + row % 8 * 2 + row % 16 // 8
