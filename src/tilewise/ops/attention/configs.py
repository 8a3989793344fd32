"""Tile configurations of the Triton kernels: frozen choices, looked up by kernel, architecture, sizes and kind of
formula.

The rows of sm_90 in 16 bit up to head dimension 256 were chosen by timing on an H200 (benchmarks/NOTES.md); the
others by compiling with few spills (tests/compile/resources.json).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """block_m queries by block_n keys, warps, stages of the software pipeline, and whether tiles come through the
    tensor memory accelerator (sm_90 and newer).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True)
class Row:
    """A configuration for head dimensions up to `width` (padded) and for `kinds` of formula (all, if none is named)."""

    width: int
    config: Config
    kinds: tuple[str, ...] = ()


# (kernel, least compute capability, element bytes) -> rows
_TABLE: dict[tuple[str, int, int], tuple[Row, ...]] = {
    ("forward", 90, 2): (
        Row(64, Config(64, 64, 4, 3, True), ("band", "curved")),
        Row(64, Config(64, 128, 4, 3, True)),
        Row(128, Config(64, 64, 4, 2, True), ("lists",)),
        Row(128, Config(64, 64, 4, 3, True)),
        Row(256, Config(128, 64, 8, 2, True)),
        Row(512, Config(32, 32, 8, 2)),
    ),
    ("keys", 90, 2): (
        Row(64, Config(64, 64, 4, 3, True)),
        Row(128, Config(64, 64, 4, 2, True)),
        Row(256, Config(64, 64, 8, 2, True)),
        Row(512, Config(16, 16, 8, 1)),
    ),
    ("queries", 90, 2): (
        Row(64, Config(64, 64, 4, 2, True), ("band", "lists", "curved")),
        Row(64, Config(64, 64, 4, 3, True)),
        Row(128, Config(64, 64, 4, 2, True), ("band", "lists", "curved")),
        Row(128, Config(128, 64, 8, 3, True)),
        Row(256, Config(128, 32, 8, 2, True)),
        Row(512, Config(32, 16, 8, 1)),
    ),
    ("forward", 100, 2): (
        Row(64, Config(64, 64, 4, 3), ("lists",)),
        Row(64, Config(128, 64, 8, 3)),
        Row(128, Config(128, 64, 8, 2)),
        Row(256, Config(128, 64, 8, 2, True)),
        Row(512, Config(64, 16, 8, 2)),
    ),
    ("keys", 100, 2): (
        Row(64, Config(64, 64, 8, 1)),
        Row(128, Config(32, 64, 8, 1)),
        Row(256, Config(32, 32, 8, 1)),
        Row(512, Config(16, 16, 8, 1)),
    ),
    ("queries", 100, 2): (
        Row(64, Config(64, 64, 8, 2)),
        Row(128, Config(64, 64, 8, 2)),
        Row(256, Config(64, 32, 8, 1)),
        Row(512, Config(32, 16, 8, 1)),
    ),
    ("forward", 80, 2): (
        Row(64, Config(128, 64, 8, 3)),
        Row(128, Config(128, 32, 8, 3)),
        Row(256, Config(64, 32, 8, 2)),
        Row(512, Config(32, 32, 8, 1)),
    ),
    ("keys", 80, 2): (
        Row(64, Config(32, 32, 4, 3), ("dropout",)),
        Row(64, Config(32, 64, 8, 2)),
        Row(128, Config(32, 64, 8, 2)),
        Row(256, Config(32, 32, 8, 1)),
        Row(512, Config(16, 16, 8, 1)),
    ),
    ("queries", 80, 2): (
        Row(64, Config(64, 64, 8, 2)),
        Row(128, Config(64, 64, 8, 2)),
        Row(256, Config(64, 32, 8, 1)),
        Row(512, Config(16, 16, 4, 1)),
    ),
    ("forward", 80, 4): (
        Row(64, Config(64, 32, 8, 2)),
        Row(128, Config(32, 32, 8, 1)),
        Row(256, Config(32, 16, 8, 1)),
        Row(512, Config(16, 16, 8, 1)),
    ),
    ("keys", 80, 4): (
        Row(64, Config(32, 32, 8, 1)),
        Row(128, Config(16, 32, 8, 1)),
        Row(512, Config(16, 16, 8, 1)),
    ),
    ("queries", 80, 4): (
        Row(64, Config(32, 32, 4, 1)),
        Row(128, Config(32, 16, 8, 1)),
        Row(512, Config(16, 16, 8, 1)),
    ),
}


@functools.lru_cache(maxsize=1024)
def config(kernel: str, sm: int, head_dim: int, head_dim_v: int, itemsize: int, kind: str = "plain") -> Config:
    """The configuration of a kernel ('forward', 'keys', 'queries') on compute capability `sm` (80, 90, ...).

    `kind` is the formula's (`variant.formula_kind`).
    """
    if sm >= 120:
        sm = 80  # 99 KB of shared memory, as sm_86 and sm_89 have, which the rows of sm_80 leave room for
    arch = max((a for k, a, size in _TABLE if k == kernel and size == itemsize and a <= sm), default=80)
    return first_fit(_TABLE[kernel, arch, itemsize], head_dim, head_dim_v, kind)


def first_fit(rows: tuple[Row, ...], head_dim: int, head_dim_v: int, kind: str) -> Config:
    """The configuration of the first row for these head dimensions and this kind of formula."""
    width = max(padded(head_dim), padded(head_dim_v))
    return next(row.config for row in rows if width <= row.width and (not row.kinds or kind in row.kinds))


def padded(head_dim: int) -> int:
    """Head dimension as the kernels hold it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
