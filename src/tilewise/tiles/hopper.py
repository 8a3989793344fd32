"""What Hopper kernels are made of: layouts of warpgroup products, named barriers, rings of tiles in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.tiles.gluon_api import async_load

FIRST_BARRIER = gl.constexpr(8)  # named barriers below are Triton's own


@gluon.constexpr_function
def product_layout(columns):
    """Registers of one warpgroup's 64 x `columns` accumulator."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _named_barrier(what, turn):
    return f"bar.{what} {int(FIRST_BARRIER) + turn}, 256; mov.b32 $0, $1;"


@gluon.jit
def _once_per_thread(ASM: gl.constexpr):
    x = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
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
def keep_before_wait(x):
    """Pin what computes x before the next wait for products, which the assembler would otherwise move ahead of it.

    The store happens if x > 1e38, which no sum of probabilities is; but the assembler does not know.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred q; .reg .b32 z; mov.b32 z, 0; setp.gt.f32 q, $1, 0f7E967699; @q st.shared.f32 [z], $1; "
        "mov.b32 $0, $1; }",
        "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fill(tensor, at, b, h, row, ring, full, empty):
    """Fetch the rows of one tile into the ring's place for the `at`-th tile, once that is free."""
    STAGES: gl.constexpr = ring.shape[0]
    stage = at % STAGES
    mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, ring.shape[3] * ring.shape[4] * 2)
    async_load(tensor, [b, h, row, 0], bar, ring.index(stage))


@gluon.jit
def filled(at, ring, full):
    """(place, tile [rows, columns]) of the ring's `at`-th tile, waiting until it is there."""
    STAGES: gl.constexpr = ring.shape[0]
    stage = at % STAGES
    mbarrier.wait(full.index(stage), (at // STAGES) & 1)
    return stage, ring.index(stage).reshape([ring.shape[3], ring.shape[4]])


@gluon.jit
def row_max(s, LAYOUT: gl.constexpr):
    """Largest of each row [64], in LAYOUT: in a thread over 16 columns at a time first, as independent chains."""
    COLUMNS: gl.constexpr = s.shape[1]
    WIDTH: gl.constexpr = 16 if COLUMNS > 16 else COLUMNS
    x = s
    if COLUMNS > WIDTH:
        folded = gl.max(s.reshape([64, COLUMNS // WIDTH, WIDTH]), 1)
        x = gl.convert_layout(folded, product_layout(WIDTH), assert_trivial=True)
    return gl.convert_layout(gl.max(x, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def thread_sums(p):
    """[64, 4]: what each thread of a quad holds of a row, summed; the four are added once, at the end."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)
