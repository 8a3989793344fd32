"""The row of the kernels for Hopper."""

from __future__ import annotations

from tilewise.core.dispatch import TRITON, Need, Row, untraced
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import (
    ANY_BATCH,
    ATOMICS,
    HALF,
    HOPPER,
    NEAR_HEADS,
    NEAR_TOKENS,
    NO_CODES,
    NO_GRAD_OF_PAGES,
)
from tilewise.ops.attention.variant import is_band
from tilewise.schedule.rule import tile_rule

_QUERIES = 128  # of a tile
_TILES = 128  # about as many as a Hopper GPU has multiprocessors


def _other_pages(call: Call) -> str | None:
    """What of a paged call neither boxes of the tensor memory accelerator nor copies of 16 bytes can fetch; None for
    all others.
    """
    if call.pages is None:
        return None
    strides = [pool.stride(n) for pool in (call.k, call.v) for n in range(3)]
    apart = next((stride for stride in strides if stride % 16), None)
    if apart is not None:
        return f"a stride of {apart}"
    return None if call.mask is None or _is_run(call.mask.text) else "a mask of several runs"


@untraced
def _is_run(text: str) -> bool:
    return tile_rule(text).spans is not None


def _few_tiles(call: Call) -> str | None:
    """Tiles of 128 queries leave more of the GPU idle than those of 64."""
    sequences = call.batch if not call.packed else 1
    tiles = -(-call.rows_q // _QUERIES) * sequences * call.num_heads_q
    return None if tiles >= _TILES else f"{tiles}"


def _narrow_window(call: Call) -> str | None:
    windowed = call.mask is not None and _is_window(call.mask.text)
    return f"{call.head_dim} and a window" if windowed and call.head_dim <= 64 else None


@untraced
def _is_window(text: str) -> bool:
    return is_band(text)


def _few_rows(call: Call) -> str | None:
    """Rows of the mean request that share a head's keys, where they are so few that keys should be divided."""
    if call.pages is None:
        return None
    rows = call.rows_q * call.group // (max(call.batch, 1) if call.packed else 1)
    return None if rows > 64 else f"{rows}"


ROW: Row[Call] = Row(
    "hopper",
    "tilewise.ops.attention.gluon_attention",
    (
        TRITON,
        Need(
            "keys that are not paged, or strides in multiples of 16 elements and a mask of one run of keys per query",
            _other_pages,
        ),
        NEAR_TOKENS,
        NEAR_HEADS,
        NO_CODES,
        NO_GRAD_OF_PAGES,
        HOPPER,
        HALF,
        Need(
            "head dimensions up to 256",
            lambda c: None if max(c.head_dim, c.head_dim_v) <= 256 else f"{c.head_dim}, {c.head_dim_v}",
        ),
        ATOMICS,
        ANY_BATCH,
    ),
    "warp-specialised kernels for Hopper, forward and backward",
    # where it was slower than the portable kernels (benchmarks/NOTES.md)
    prefers=(
        Need(f"at least {_TILES} tiles of {_QUERIES} queries", _few_tiles),
        Need("a mask that is no window, or head dimensions above 64", _narrow_window),
        Need("keys that are not paged, or on average more than 64 query rows per KV head and request", _few_rows),
        Need("captured tensors without gradients", lambda c: "some wanted" if any(c.grad_captured) else None),
    ),
    backward="backward",
)
