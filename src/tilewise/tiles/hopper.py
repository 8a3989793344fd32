"""What Hopper kernels are made of: layouts of warpgroup products, named barriers, rings of tiles and messages in shared
memory.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.tiles.arithmetic import LOG2E
from tilewise.tiles.gluon_api import async_load, by_eights

LAST_ROW = gl.constexpr(2**30)
POSTS = gl.constexpr(2)  # messages of a board that are on their way at a time
FIRST_BARRIER = gl.constexpr(8)  # named barriers below are Triton's own


@gluon.constexpr_function
def product_layout(columns, depth=16):
    """Registers of one warpgroup's 64 x `columns` accumulator, of products of `depth` numbers of 32 bytes at a time."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])


@gluon.constexpr_function
def _named_barrier(what, turn):
    return f"bar.{what} {int(FIRST_BARRIER) + turn}, 256; mov.b32 $0, $1;"


@gluon.jit
def _once_per_thread(ASM: gl.constexpr, WARPS: gl.constexpr = 4):
    x = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_turn(turn: gl.constexpr):
    """Wait until another warpgroup gives `turn`."""
    _once_per_thread(_named_barrier("sync", turn))


@gluon.jit
def give_turn(turn: gl.constexpr):
    """Let the warpgroup that waits for `turn` go on."""
    _once_per_thread(_named_barrier("arrive", turn))


@gluon.jit
def wait_for_both():
    """Wait until both of two warpgroups are here."""
    wait_turn(0)


_KEEP = (
    "{ .reg .pred q; .reg .b32 z; .reg .f32 t; mov.b32 z, 0; max.f32 t, $2, $3; setp.gt.f32 q, t, 0f7E967699; "
    "@q st.shared.f32 [z], t; mov.b32 $0, $2; mov.b32 $1, $3; }"
)
KEEP = gl.constexpr(_KEEP)


@gluon.jit
def keep_before_wait(x):
    """Pin what computes x, two numbers a thread, before the next wait for products, which the assembler would otherwise
    move ahead of it.

    The store happens if one is > 1e38, which no sum of probabilities is; but the assembler does not know.
    """
    gl.inline_asm_elementwise(KEEP, "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.constexpr_function
def _keep_last(n):
    last = n + n // 4 - 1
    unused = " ".join(f"mov.b32 ${k}, 0;" for k in range(n // 4))
    return (
        "{ .reg .pred q; .reg .b32 z; mov.b32 z, 0; "
        f"setp.gt.f32 q, ${last}, 0f7E967699; @q st.shared.f32 [z], ${last}; }} {unused}"
    )


@gluon.constexpr_function
def _keep_last_places(n):
    return ",".join(["=r"] * (n // 4) + ["f"] * n)


@gluon.jit
def keep_last_before_wait(x):
    """`keep_before_wait` of numbers [64, N / 8, 4, 2] that nothing sums up: of every N / 16 the last."""
    PACK: gl.constexpr = x.shape[1] // 2
    gl.inline_asm_elementwise(_keep_last(PACK), _keep_last_places(PACK), [x], dtype=gl.int8, is_pure=False, pack=PACK)


_KEEP_16 = (
    "{ .reg .pred q; .reg .b32 t; lop3.b32 t, $8, $9, $10, 0xFE; lop3.b32 t, t, $11, $12, 0xFE; "
    "lop3.b32 t, t, $13, $14, 0xFE; or.b32 t, t, $15; setp.eq.u32 q, t, 0xFFFFFFFF; @q st.shared.b32 [t], t; "
    + " ".join(f"mov.b32 ${n}, ${n + 8};" for n in range(8))
    + " }"
)
KEEP_16 = gl.constexpr(_KEEP_16)
KEEP_16_PLACES = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))


@gluon.jit
def keep_tile_before_wait(x):
    """`keep_before_wait` of a 16-bit tile that goes on into products; it would be stored if all its bits were 1."""
    return gl.inline_asm_elementwise(KEEP_16, KEEP_16_PLACES, [x], dtype=x.dtype, is_pure=False, pack=16)


@gluon.jit
def ring_turn(at, STAGES: gl.constexpr):
    """(place in a ring, phase of its barriers) of the `at`-th tile."""
    return at % STAGES, (at // STAGES) & 1


@gluon.jit
def take(NEXT):
    """The next number that nobody has taken."""
    return gl.atomic_add(NEXT, 1, sem="relaxed")


@gluon.jit
def deal(NEXT):
    """The next item of the grid that no program has taken. The first that a program takes is that of its own number."""
    return gl.num_programs(0) + take(NEXT)


_PAUSE = "nanosleep.u32 2000; mov.b32 $0, $1;"
_FENCE = "fence.proxy.async.global; mov.b32 $0, $1;"
PAUSE = gl.constexpr(_PAUSE)
FENCE = gl.constexpr(_FENCE)


@gluon.jit
def wait_for_count(COUNT, wanted, WARPS: gl.constexpr):
    """Wait, as a role of so many warps, until other programs have counted so far; what they wrote before is seen then.

    Only the last look acquires, since that empties the cache in front of shared memory. Its outcome is used: Triton
    would leave it out else.
    """
    while gl.atomic_add(COUNT, 0, sem="relaxed") < wanted:
        _once_per_thread(PAUSE, WARPS)
    while gl.atomic_add(COUNT, 0, sem="acquire") < wanted:
        _once_per_thread(PAUSE, WARPS)


@gluon.jit
def read_by_tma(WARPS: gl.constexpr):
    """Let the TMA read of global memory what this role of so many warps sees."""
    _once_per_thread(FENCE, WARPS)


@gluon.jit
def message_board(NUMBERS: gl.constexpr, READERS: gl.constexpr):
    """Shared memory by which one role tells READERS others NUMBERS numbers at a time, with its barriers."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    posts = gl.allocate_shared_memory(gl.int32, [POSTS * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [POSTS, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [POSTS, 1], BAR)
    for n in gl.static_range(POSTS):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=READERS)
    return posts, full, empty


@gluon.jit
def post(numbers, at, board, WARPS: gl.constexpr = 1):
    """Write the `at`-th message, as a role of so many warps. What one role works out costs the others, who read it, no
    registers.
    """
    posts, full, empty = board
    NUMBERS: gl.constexpr = posts.shape[0] // POSTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place, phase = ring_turn(at, POSTS)
    mbarrier.wait(empty.index(place), phase ^ 1)
    for n in gl.static_range(NUMBERS):
        posts.index(place * NUMBERS + n).store(gl.full([1], numbers[n], gl.int32, layout=LAYOUT))
    mbarrier.arrive(full.index(place))


@gluon.jit
def post_last(at, board, WARPS: gl.constexpr = 1):
    """The message after which there is none: zeros."""
    END: gl.constexpr = (0,) * (board[0].shape[0] // POSTS)
    post(END, at, board, WARPS)


@gluon.jit
def posted(at, board, WARPS: gl.constexpr):
    """The `at`-th message, read by a role of so many warps."""
    posts, full, empty = board
    NUMBERS: gl.constexpr = posts.shape[0] // POSTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place, phase = ring_turn(at, POSTS)
    mbarrier.wait(full.index(place), phase)
    numbers = ()
    for n in gl.static_range(NUMBERS):
        numbers = numbers + (gl.sum(posts.index(place * NUMBERS + n).load(LAYOUT), 0),)  # noqa: RUF005 (unknown to Triton)
    mbarrier.arrive(empty.index(place))
    return numbers


@gluon.jit
def afresh(x):
    """x, a number that is known to the whole kernel, for this role alone. What several roles work out of such a number
    is worked out before they part, else, and then spilled by those with few registers, and by the others.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def all_afresh(numbers):
    """A formula's numbers and strides `afresh`, those that are whole."""
    found = ()
    for n in gl.static_range(len(numbers)):
        number = numbers[n]
        if number.dtype == gl.int32:
            number = afresh(number)
        found = found + (number,)  # noqa: RUF005 (unknown to Triton)
    return found


@gluon.jit
def sequence(b, CU_SEQLENS, seqlen, PACKED: gl.constexpr):
    """(sequence as descriptors know it, first row, rows) of batch element b, or of a packed sequence.

    Descriptors of packed tensors have 2**30 rows, and a sequence of theirs ends at the last: tiles that reach beyond
    its end find nothing there. Two dimensions before, whose strides add up to none of this in 64 bits, bring the
    address back (the way of Triton's `ragged_tma`).
    """
    if PACKED:
        row0 = gl.load(CU_SEQLENS + b)
        rows = gl.load(CU_SEQLENS + b + 1) - row0
        here = (LAST_ROW + 0 * row0, row0 + rows, LAST_ROW - rows)
    else:
        row0 = 0 * b
        rows = afresh(seqlen)
        here = (b, row0, row0)
    return here, row0, rows


@gluon.jit
def at_row(here, h, row, column=0):
    """Coordinates of a tile's first row in a descriptor."""
    return [here[0], here[1], h, here[2] + row, column]


@gluon.constexpr_function
def tile_bytes(ring):
    """Bytes of one tile of a ring of tiles."""
    return ring.shape[-2] * ring.shape[-1] * ring.dtype.primitive_bitwidth // 8


@gluon.jit
def fill(tensor, at, here, h, row, ring, full, empty, column=0):
    """Fetch the rows of one tile into the ring's place for the `at`-th tile, once that is free."""
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, tile_bytes(ring))
    async_load(tensor, at_row(here, h, row, column), bar, ring.index(stage))


@gluon.jit
def fill_with(tensor, numbers, at, here, h, row, tile, ring, number_ring, full, empty):
    """`fill`, and with the rows a number for each of them: row `tile` of a matrix."""
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, tile_bytes(ring) + ring.shape[4] * 4)
    async_load(tensor, at_row(here, h, row), bar, ring.index(stage))
    async_load(numbers, [tile, 0], bar, number_ring.index(stage))


@gluon.jit
def filled(at, ring, full, BY_EIGHTS: gl.constexpr = False):
    """(place, tile [rows, columns]) of the ring's `at`-th tile, waiting until it is there."""
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(full.index(stage), phase)
    return stage, matrix(ring.index(stage), BY_EIGHTS)


@gluon.jit
def moving(ring, place, at):
    """The tile at a place that is always the same, for the `at`-th step of a loop: as if it moved. Addresses of the
    pieces of what stays would be worked out before the loop, and spilled.
    """
    return matrix(ring.index(place + gl.minimum(at, 0)))


@gluon.jit
def matrix(tile, BY_EIGHTS: gl.constexpr = False):
    """A tile [1, 1, 1, rows, columns] of shared memory as [rows, columns]; its rows may lie `by_eights`."""
    if BY_EIGHTS:
        return by_eights(tile, tile.shape[3], tile.shape[4])
    else:
        return tile.reshape([tile.shape[3], tile.shape[4]])


@gluon.jit
def with_columns(once, b, h, start, last, args, nums, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, N: gl.constexpr):
    """What a formula computed once for the rows, and what it does for the columns `start` .. `start` + N - 1 of a tile
    in LAYOUT, positions beyond `last` being `last`. Where keys are divided they begin at a multiple of N
    (`formula.emit.Emitter.columns`).
    """
    if COLUMNS is not None:
        x = gl.minimum(start + gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [4], [0])), last)
        once = once + COLUMNS(b, h, x, gl.minimum(start, last), LAYOUT, args, nums)
    return once


@gluon.constexpr_function
def hidden(scaled):
    """A score that a mask hides; a row whose largest is below half of it sees nothing. Products of queries and keys
    that are still to be scaled must not overflow then; scores that are `scaled` may be as low as -1e38 by a formula.
    """
    return -2.3e38 if scaled else -1e30


_RUN = "{ .reg .b32 n; sub.s32 n, $2, $1; max.s32 n, n, 0; bmsk.clamp.b32 $0, $1, n; }"
_SELECT = "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.b32 $0, $1, $4, p; }"
RUN_OF_BITS = gl.constexpr(_RUN)
SELECT = gl.constexpr(_SELECT)


@gluon.jit
def numbers_before(column, quad):
    """How many of the numbers that a thread of a quad has of a row, two in eight columns, lie before `column`."""
    return (column >> 3) * 2 + gl.minimum(gl.maximum((column & 7) - 2 * quad, 0), 2)


@gluon.jit
def where_within(x, start, first, last, OTHER: gl.constexpr):
    """x [64, N], N <= 128, of a tile whose columns are `start` on, OTHER outside its row's run `first` .. `last` (empty
    where first > last). A row's run is bits of one integer: the assembler turns several into predicates at a time.
    """
    N: gl.constexpr = x.shape[1]
    parts = parts_of(x)
    OF_PARTS: gl.constexpr = parts.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, OF_PARTS)))
    QUAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, OF_PARTS)))
    first = gl.minimum(gl.maximum(first - start, 0), N)
    end = gl.minimum(gl.maximum(last - start + 1, 0), N)
    quad = gl.arange(0, 4, layout=QUAD)[None, None, :, None]
    skipped = numbers_before(gl.convert_layout(first, ROW, assert_trivial=True)[:, None, None, None], quad)
    passed = numbers_before(gl.convert_layout(end, ROW, assert_trivial=True)[:, None, None, None], quad)
    run = gl.inline_asm_elementwise(RUN_OF_BITS, "=r,r,r", [skipped, passed], dtype=gl.int32, is_pure=True, pack=1)
    found = gl.inline_asm_elementwise(
        SELECT, "=f,f,r,r,f", [parts, run, 1 << bit_of(parts), OTHER], dtype=gl.float32, is_pure=True, pack=1
    )
    return whole(found, x)


@gluon.jit
def hide_outside(s, start, first, last, HIDDEN: gl.constexpr):
    """Scores of a tile, HIDDEN outside each row's run."""
    return where_within(s, start, first, last, HIDDEN)


@gluon.jit
def only_within(p, start, first, last):
    """p of a tile, 0 outside each row's run."""
    return where_within(p, start, first, last, 0.0)


@gluon.jit
def tilt_of(b, h, args, nums, LINEAR: gl.constexpr):
    """What a linear score adds for each i, for each j, and at all, in base 2."""
    tilt = (0.0, 0.0, 0.0)
    if LINEAR is not None:
        of_i, of_j, rest = LINEAR(b, h, args, nums)
        tilt = (of_i * LOG2E, of_j * LOG2E, rest * LOG2E)
    return tilt


@gluon.jit
def tilted(tilt, position, start, of_own: gl.constexpr):
    """What a linear score adds to the positions of one side of a tile, beside what grows from the other side's first
    position, `start`, on. Only differences of positions are multiplied: large numbers would cancel.
    """
    return tilt[of_own] * (position - start).to(gl.float32) + ((tilt[0] + tilt[1]) * start + tilt[2])


@gluon.jit
def parts_of(x):
    """x [64, N] as [64, N / 8, 4, 2]: a thread of a quad has pairs of neighbours; all but its number is constant."""
    return x.reshape([64, x.shape[1] // 8, 4, 2])


@gluon.jit
def whole(parts, like):
    """What `parts_of` took apart, in the layout of `like`."""
    return gl.convert_layout(parts.reshape([64, like.shape[1]]), like.type.layout, assert_trivial=True)


@gluon.constexpr_function
def of_threads(parts):
    """Registers of a number [64, 4] for each thread of a quad."""
    return gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))


@gluon.jit
def thread_sums(p):
    """[64, 4]: what each thread of a quad holds of a row, summed; the four are added once, at the end."""
    return gl.sum(gl.sum(parts_of(p), 3), 1)


@gluon.jit
def thread_max(s):
    """[64, 4]: the largest of what each thread of a quad holds of a row, found in eight independent chains."""
    N: gl.constexpr = s.shape[1]
    largest = gl.max(gl.max(gl.max(s.reshape([64, N // 32, 4, 4, 2]), 1), 3), 1)
    return gl.convert_layout(largest, of_threads(parts_of(s)), assert_trivial=True)


@gluon.jit
def thread_bits(seen):
    """[64, 4]: what each thread of a quad holds of a row of [64, 128], one bit a number."""
    parts = parts_of(seen.to(gl.int32))
    return gl.sum(gl.sum(parts << bit_of(parts), 3), 1)


@gluon.jit
def bit_of(parts):
    """The bits that stand for the numbers of a thread, along `parts` [64, 16 or fewer, 4, 2]."""
    EIGHTS: gl.constexpr = parts.shape[1]
    gl.static_assert(EIGHTS <= 16)
    EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, parts.type.layout)))
    eights = (2 * gl.arange(0, EIGHTS, layout=EIGHT))[None, :, None, None]
    return eights + gl.arange(0, 2, layout=PAIR)[None, None, None, :]


@gluon.jit
def only_bits(s, bits):
    """Scores [64, 128], -inf where a thread's bits (`thread_bits`) are 0."""
    parts = parts_of(s)
    seen = (over_parts(bits, parts) >> bit_of(parts)) & 1
    return whole(gl.where(seen != 0, parts, float("-inf")), s)


@gluon.jit
def of_row(x, like):
    """x [64], a number for each row, as `like` [64, 4] has it: for each thread of a quad."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def over_parts(x, parts):
    """x [64, 4], a number for each thread of a quad, along `parts`."""
    return gl.convert_layout(x, of_threads(parts), assert_trivial=True).expand_dims(1).expand_dims(3)


_RAISE = (
    "{ .reg .pred p; .reg .f32 t; setp.gt.f32 p, $2, $6; setp.gt.or.f32 p, $3, $7, p; "
    "vote.sync.any.pred p, p, 0xffffffff; mov.f32 $0, $4; mov.f32 $1, $5; @!p bra DONE; "
    + " ".join(
        f"shfl.sync.bfly.b32 t, ${x}, 1, 31, 0xffffffff; max.f32 ${new}, ${x}, t; "
        f"shfl.sync.bfly.b32 t, ${new}, 2, 31, 0xffffffff; max.f32 ${new}, ${new}, t; "
        f"setp.gt.f32 p, ${new}, ${limit}; selp.f32 ${new}, ${new}, ${old}, p;"
        for new, x, old, limit in ((0, 2, 4, 6), (1, 3, 5, 7))
    )
    + " DONE: }"
)
RAISE = gl.constexpr(_RAISE)


@gluon.jit
def raised(m, largest, by):
    """The running maxima m [64, 4], alike in a quad, after a tile of which each thread knows its `largest`: the row's
    largest where that is more than `by` above m, else m. Threads of a warp ask each other only if one of them passes m
    by so much, which after a few tiles is rare.
    """
    limits = m + by
    return gl.inline_asm_elementwise(
        RAISE, "=&f,=&f,f,f,f,f,f,f", [largest, m, limits], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.constexpr_function
def _rescale(n):
    first = 2 * n  # of the factors, which alternate between the thread's two rows every two numbers
    lines = " ".join(f"mul.f32 ${k}, ${k}, ${first + k};" for k in range(n))
    return (
        f"{{ .reg .pred p; setp.neu.f32 p, ${first}, 0f3F800000; setp.neu.or.f32 p, ${first + 2}, 0f3F800000, p; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; {lines} DONE: }}"
    )


@gluon.constexpr_function
def _rescale_places(n):
    return ",".join(["=&f"] * n + [str(k) for k in range(n)] + ["f"] * n)


@gluon.jit
def rescaled(acc, alpha):
    """acc [64, D] times alpha [64, 4], a factor for each thread of a quad, alike in it; a warp multiplies nothing where
    all of its factors are 1.
    """
    PACK: gl.constexpr = 64 if acc.shape[1] >= 128 else acc.shape[1] // 2
    parts = parts_of(acc)
    factors = over_parts(alpha, parts)
    parts = gl.inline_asm_elementwise(
        _rescale(PACK), _rescale_places(PACK), [parts, factors], dtype=gl.float32, is_pure=False, pack=PACK
    )
    return whole(parts, acc)


@gluon.jit
def keep_scores(seed, row, offs_i, start_j, dropout, like):
    """Which of the scores `like` [64, N] survive: the bits of `tiles.dropout`, in its layout. start_j is a multiple of
    4. Four keys share a counter, and a thread has two of them, side by side.
    """
    N: gl.constexpr = like.shape[1]
    PAIRS: gl.constexpr = gl.SliceLayout(2, like.reshape([64, N // 2, 2]).type.layout)
    pair = gl.arange(0, N // 2, layout=gl.SliceLayout(0, PAIRS))[None, :]
    rows = gl.convert_layout(offs_i, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
    c0 = start_j // 4 + pair // 2 + 0 * rows
    w0, w1, w2, w3 = tl.philox(seed, c0, rows + 0 * pair, row + 0 * c0, 0 * c0)
    first = pair % 2 == 0
    words = gl.join(gl.where(first, w0, w2), gl.where(first, w1, w3)).reshape([64, N])
    words = gl.convert_layout(words, like.type.layout, assert_trivial=True)
    return words >= gl.minimum(dropout * 4294967296.0, 4294967040.0).to(gl.uint32)
