"""Tiles of keys out of pages of a pool, for Hopper's kernels: a box of the tensor memory accelerator for each page."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.tiles.gluon_api import async_load, reinterpret, rows_of_eight
from tilewise.tiles.hopper import fill, ring_turn, tile_bytes

NOWHERE = gl.constexpr(-1)  # a page that no pool has: what is fetched from there is zero


@gluon.jit
def table_of(b, pages):
    """Where the pages of request b stand."""
    TABLE, FIRST, stride_t, _mended = pages
    return TABLE + b.to(gl.int64) * stride_t if FIRST is None else TABLE + gl.load(FIRST + b)


@gluon.jit
def fill_tile(tensor, at, here, h, start, ring, full, empty, table, mended, fixed, OF: gl.constexpr):
    """`tiles.hopper.fill`, or where keys are paged `fill_pages`; `here` is then how many there are."""
    if fixed.paged:
        fill_pages(tensor, at, here, h, start, ring, full, empty, table, mended, fixed, OF)
    else:
        fill(tensor, at, here, h, start, ring, full, empty)


@gluon.jit
def fill_pages(tensor, at, keys, h, start, ring, full, empty, table, mended, fixed, OF: gl.constexpr):
    """Fetch K (OF is 0) or V (1) of the keys `start` on of one request, as the `at`-th tile of the ring, once that has
    a place.

    What lies behind the last key in its page may be anything, NaN too, so it is overwritten with zeros before anyone
    is told that the tile is there, by means of a barrier of `mended`.
    """
    PAGE: gl.constexpr = min(fixed.page, ring.shape[4])
    own = mended.index(OF)
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if (start < keys) & (start + ring.shape[4] > keys) & (keys % PAGE != 0):
        mbarrier.invalidate(own)  # used by this warp alone, and each time as if it were new
        mbarrier.init(own, count=1)
        fence_async_shared()
        fetch_pages(tensor, keys, h, start, ring, stage, own, table, fixed, OF)
        mbarrier.wait(own, 0)
        clear_rows(ring, stage, (keys - start) // PAGE * PAGE, (keys - start) % PAGE, PAGE)
        fence_async_shared()
        mbarrier.arrive(full.index(stage))
    else:
        fetch_pages(tensor, keys, h, start, ring, stage, full.index(stage), table, fixed, OF)


@gluon.jit
def fetch_pages(tensor, keys, h, start, ring, stage, bar, table, fixed, OF: gl.constexpr):
    """Ask for a tile's pages, or zeros behind the last: for a box of each, or where columns are no multiple of 64 for
    eight rows and 64 columns at a time.
    """
    ROWS: gl.constexpr = 8 * tensor.block_shape[1]
    WIDE: gl.constexpr = ring.shape[5] // (64 * tensor.block_shape[2])  # boxes side by side
    PARTS: gl.constexpr = ring.shape[4] // ROWS
    EIGHTS: gl.constexpr = fixed.eights_k if OF == 0 else fixed.eights_v
    boxes = reinterpret(ring, ring.shape[0] * PARTS * WIDE, tensor)
    mbarrier.expect(bar, tile_bytes(ring))
    for x in gl.static_range(PARTS):
        first = start + x * ROWS
        page = gl.load(table + first // fixed.page, mask=first < keys, other=NOWHERE)
        eight = page * EIGHTS + first % fixed.page // 8
        for y in gl.static_range(WIDE):
            async_load(tensor, [h, eight, 0, 0, y * 64], bar, boxes.index((stage * PARTS + x) * WIDE + y))


@gluon.jit
def clear_rows(ring, stage, first, valid, PAGE: gl.constexpr):
    """Zeros in the rows `first` + `valid` to `first` + PAGE of a tile, eight rows of 64 columns at a time."""
    HALVES: gl.constexpr = ring.shape[5] // 64
    EIGHTS: gl.constexpr = ring.shape[4] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    eights = rows_of_eight(ring, ring.shape[0] * HALVES * EIGHTS)
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for n in range(valid // 8, PAGE // 8):
        for y in gl.static_range(HALVES):
            tile = eights.index((stage * EIGHTS + first // 8 + n) * HALVES + y)
            x = tile.load(LAYOUT)
            tile.store(gl.where((n * 8 + rows < valid)[:, None], x, gl.zeros_like(x)))
