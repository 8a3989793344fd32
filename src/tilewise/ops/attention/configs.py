"""Tile configurations of the Triton kernels: frozen choices, looked up by pass, architecture, head dimension and
element size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """block_m queries by block_n keys, warps, stages of the software pipeline, and whether tiles come through the tensor memory
    accelerator (sm_90 and newer)."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False


# (pass, least sm, element bytes) -> rows of (largest padded head dimension, Config); the first row that is wide
# enough is taken.
_TABLE: dict[tuple[str, int, int], tuple[tuple[int, Config], ...]] = {
    ("forward", 90, 2): (
        (64, Config(128, 128, 8, 3)),
        (128, Config(128, 128, 8, 3)),
        (256, Config(128, 64, 8, 2)),
        (512, Config(64, 32, 8, 2)),
    ),
    ("forward", 80, 2): (
        (64, Config(128, 64, 4, 3)),
        (128, Config(128, 32, 4, 3)),
        (256, Config(64, 32, 4, 2)),
        (512, Config(32, 16, 4, 2)),
    ),
    ("keys", 90, 2): (
        (64, Config(64, 128, 8, 3)),
        (128, Config(64, 128, 8, 3)),
        (256, Config(32, 64, 8, 1)),
        (512, Config(16, 32, 8, 1)),
    ),
    ("keys", 80, 2): (
        (64, Config(32, 64, 4, 3)),
        (128, Config(32, 64, 4, 2)),
        (256, Config(16, 32, 4, 1)),
        (512, Config(16, 16, 4, 1)),
    ),
    ("queries", 90, 2): (
        (64, Config(128, 64, 8, 3)),
        (128, Config(128, 64, 8, 2)),
        (256, Config(64, 32, 8, 1)),
        (512, Config(32, 16, 8, 1)),
    ),
    ("queries", 80, 2): (
        (64, Config(64, 32, 4, 3)),
        (128, Config(64, 32, 4, 2)),
        (256, Config(32, 16, 4, 1)),
        (512, Config(16, 16, 4, 1)),
    ),
    ("forward", 80, 4): ((64, Config(64, 32, 4, 2)), (128, Config(64, 32, 8, 1)), (256, Config(32, 16, 8, 1)), (512,
    Config(16, 16, 8, 1))),
    ("keys", 80, 4): ((64, Config(32, 32, 4, 1)), (128, Config(16, 32, 8, 1)), (512, Config(16, 16, 8, 1))),
    ("queries", 80, 4): ((64, Config(32, 32, 4, 1)), (128, Config(32, 16, 8, 1)), (512, Config(16, 16, 8, 1))),
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def config(kernel: str, sm: int, head_dim: int, head_dim_v: int, itemsize: int) -> Config:
    """The configuration for a kernel ('forward', 'keys', 'queries') on compute capability `sm` (80, 90, ...)."""
    width = max(padded(head_dim), padded(head_dim_v))
    arch = max((a for k, a, size in _TABLE if k == kernel and size == itemsize and a <= sm), default=80)
    return next(c for limit, c in _TABLE[kernel, arch, itemsize] if width <= limit)


def padded(head_dim: int) -> int:
    """Head dimension as the kernels hold it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
