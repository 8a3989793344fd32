"""Tiles of keys out of pages of a pool, for Hopper's kernels: a box of the tensor memory accelerator for each page."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.tiles.gluon_api import async_load, reinterpret, rows_of_eight
from tilewise.tiles.hopper import fill, ring_turn, tile_bytes

NOWHERE = gl.constexpr(2**30)  # a page that no pool has: what is fetched from there is zero


@gluon.jit
def table_of(b, pages):
    """Where the pages of request b stand."""
    TABLE, FIRST, stride_t, _mended = pages
    return TABLE + b.to(gl.int64) * stride_t if FIRST is None else TABLE + gl.load(FIRST + b)


@gluon.jit
def fill_tile(tensor, at, here, h, start, ring, full, empty, table, pages, fixed):
    """`tiles.hopper.fill`, or where keys are paged `fill_pages`; `here` is then how many there are."""
    if fixed.paged:
        fill_pages(tensor, at, here, h, start, ring, full, empty, table, pages[3].index(0), fixed)
    else:
        fill(tensor, at, here, h, start, ring, full, empty)


@gluon.jit
def fill_pages(tensor, at, keys, h, start, ring, full, empty, table, mended, fixed):
    """Fetch the keys `start` on of one request, as the `at`-th tile of the ring, once that has a place.

    What lies behind the last key in its page may be anything, NaN too, so it is overwritten with zeros before anyone
    is told that the tile is there.
    """
    BOX: gl.constexpr = tensor.block_shape[1]
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if (start < keys) & (start + ring.shape[4] > keys) & (keys % BOX != 0):
        mbarrier.invalidate(mended)  # used by this warp alone, and each time as if it were new
        mbarrier.init(mended, count=1)
        fence_async_shared()
        fetch_pages(tensor, keys, h, start, ring, stage, mended, table, fixed)
        mbarrier.wait(mended, 0)
        clear_rows(ring, stage, (keys - start) // BOX * BOX, (keys - start) % BOX, BOX)
        fence_async_shared()
        mbarrier.arrive(full.index(stage))
    else:
        fetch_pages(tensor, keys, h, start, ring, stage, full.index(stage), table, fixed)


@gluon.jit
def fetch_pages(tensor, keys, h, start, ring, stage, bar, table, fixed):
    """Ask for a tile's pages, or zeros behind the last, all in 64 columns at a time."""
    HALVES: gl.constexpr = ring.shape[5] // 64  # what a box can be wide
    BOX: gl.constexpr = tensor.block_shape[1]
    PARTS: gl.constexpr = ring.shape[4] // BOX
    boxes = reinterpret(ring, ring.shape[0] * HALVES * PARTS, tensor)
    mbarrier.expect(bar, tile_bytes(ring))
    coming = gl.load(table + start // fixed.page, mask=start < keys, other=NOWHERE)
    for x in range(PARTS):
        page = coming
        first = start + (x + 1) * BOX
        coming = gl.load(table + first // fixed.page, mask=first < keys, other=NOWHERE)
        row = (start + x * BOX) % fixed.page
        for y in gl.static_range(HALVES):
            async_load(tensor, [page, row, h, y * 64], bar, boxes.index((stage * HALVES + y) * PARTS + x))


@gluon.jit
def clear_rows(ring, stage, first, valid, BOX: gl.constexpr):
    """Zeros in the rows `first` + `valid` to `first` + BOX of a tile, eight rows of 64 columns at a time."""
    HALVES: gl.constexpr = ring.shape[5] // 64
    EIGHTS: gl.constexpr = ring.shape[4] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    eights = rows_of_eight(ring, ring.shape[0] * HALVES * EIGHTS)
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for n in range(valid // 8, BOX // 8):
        for y in gl.static_range(HALVES):
            tile = eights.index((stage * HALVES + y) * EIGHTS + first // 8 + n)
            x = tile.load(LAYOUT)
            tile.store(gl.where((n * 8 + rows < valid)[:, None], x, gl.zeros_like(x)))
