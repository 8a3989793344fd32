"""Tiles of keys out of pages of a pool, for Hopper's kernels: a box of the tensor memory accelerator for each page, or
rows that four warps copy 16 bytes a thread at a time, of pages that no boxes reach.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.tiles.gluon_api import async_load, copy_async, reinterpret, rows_of_eight
from tilewise.tiles.hopper import fill, ring_turn, tile_bytes

NOWHERE = gl.constexpr(-1)  # a page that no pool has: what is fetched from there is zero
ENDLESS = gl.constexpr(2**30)  # tokens of a page where each request has but one, so that lengths compile nothing


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


# rows ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def places_of(first, r, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """(entry of a block table, place in its page) of the keys first + r of a tile; `first` is a multiple of BLOCK_N."""
    if PAGE == ENDLESS:
        return 0 * r, (first + r).to(gl.int64)
    elif BLOCK_N % PAGE == 0:  # places are the same in every tile
        return first // PAGE + r // PAGE, r % PAGE
    else:
        return (first + r) // PAGE, (first + r) % PAGE


@gluon.jit
def rows_of(pages, first, hk, r, strides, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, MULTIPLE: gl.constexpr):
    """Where the rows of a head's keys first + r begin in a pool, whose strides are (page, place, head)."""
    _entry, place = places_of(first, r, BLOCK_N, PAGE)
    in_page = place * strides[1] + hk * strides[2]
    if strides[0].dtype.primitive_bitwidth == 32:  # one instruction: the compiler would multiply 64 bits by 64
        rows = gl.inline_asm_elementwise(
            "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [pages, strides[0], in_page.to(gl.int64)], dtype=gl.int64,
            is_pure=True, pack=1,
        )  # fmt: skip
        return gl.multiple_of(rows, MULTIPLE)
    else:
        return pages.to(gl.int64) * strides[0] + in_page


@gluon.constexpr_function
def of_rows(columns, bits):
    """Rows of a tile that four warps copy 16 bytes a thread at a time."""
    each = 128 // bits
    return gl.BlockedLayout([1, each], [32 * each // columns, columns // each], [4, 1], [1, 0])


@gluon.jit
def pages_of_keys(table, keys, first, r, BLOCK_N: gl.constexpr, fixed):
    """Pages of the keys first + r of a request that has so many, 0 where there is none."""
    entry, _place = places_of(first, r, BLOCK_N, fixed.page)
    return gl.load(table + entry, mask=r < keys - first, other=0)


@gluon.jit
def gather_rows(pool, found, at, DIM: gl.constexpr, fixed):
    """Copy the rows of a tile of K or V, `pool`'s, into the ring's place for the `at`-th tile, once that is free: of
    the head h the keys first + r, in the pages `found`. Zeros behind the last key and beyond DIM columns.
    """
    POOL, strides, ring, full, empty = pool
    pages, first, keys, h, r = found
    LAYOUT: gl.constexpr = of_rows(ring.shape[2], 16)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BLOCK_N: gl.constexpr = ring.shape[1]
    offs_d = gl.arange(0, ring.shape[2], layout=gl.SliceLayout(0, LAYOUT))
    rows = gl.convert_layout(rows_of(pages, first, h, r, strides, BLOCK_N, fixed.page, 16), ROWS)
    there = gl.arange(0, BLOCK_N, layout=ROWS) < keys - first
    stage, phase = ring_turn(at, ring.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mask = there[:, None] & (offs_d < DIM)[None, :]
    copy_async(ring.index(stage), POOL + rows[:, None] + offs_d[None, :], mask=mask)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
