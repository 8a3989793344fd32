"""What Hopper's kernels are told when they are compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl


class Fixed(NamedTuple):
    """What is known when a kernel is compiled: numbers, and the formula's device functions, None where not needed."""

    heads: int
    group: int
    lists: bool
    tiles: Any
    rows: Any
    mask_once: Any
    mask_columns: Any
    visible: Any
    score_once: Any
    score_columns: Any
    score: Any
    linear: Any
    scale_first: bool  # scores are scaled before anything else
    guard: bool  # tiles may need a mask,
    whole: bool  # only where sequences end, or for rows that see nothing
    packed: bool
    paged: bool
    of_keys: bool  # programs own keys, else queries
    registers: int
    # of the forward
    block_n: int | None = None
    consumers: int | None = None
    stages: int | None = None
    sinks: bool | None = None
    dropout: bool | None = None
    outputs: int | None = None  # places for outputs: one of each warpgroup, or one that they use in turn
    ahead: int | None = None  # for how many items queries have places
    limited: bool | None = None  # exponentials need no maximum
    in_base_2: bool | None = None  # scores come out of the formula, or of the multiply-add of a linear one, in base 2
    in_boxes: bool | None = None  # pages come by the tensor memory accelerator,
    gathered: bool | None = None  # or row by row
    registers_of_fetch: int | None = None  # of who gathers
    page: int | None = None  # tokens of a page
    head_dim: int | None = None  # columns of keys, and of values, where rows are gathered
    head_dim_v: int | None = None
    eights_k: int | None = None  # from one page of a pool to the next, in eights of tokens
    eights_v: int | None = None
    few: int | None = None  # rows of queries up to which a request is another launch's
    codes: bool | None = None  # q, k and v are codes,
    p_largest: int | None = None  # and weights, the largest of which becomes this;
    q_groups: int | None = None  # scales of a block of queries,
    k_groups: int | None = None  # and of keys
    biased: bool | None = None  # whether centred keys left queries a bias,
    centred: bool | None = None  # and values are centred,
    value_blocks: bool | None = None  # of which each block has a scale
    exact_sums: bool | None = None  # weights are summed before they are codes
    skips: bool | None = None  # tiles of small weights count for nothing
    meets: int | None = None  # after how many tiles programs wait for each other, if they do
    moved: bool | None = None  # lists say where tiles begin
    dealt: bool | None = None  # items are dealt out while the kernel runs, and not divided beforehand
    # of the backward
    slope: Any = None  # the score's derivative
    accumulate: Any = None  # adds the gradients of captured tensors
    block_m: int | None = None  # queries of a tile
    parts: bool | None = None  # lists say of which tiles a warpgroup's keys are seen by nothing
    begins: bool | None = None  # programs work out what their queries begin with
    sums: bool | None = None  # programs add to dQ in memory,
    ordered: bool | None = None  # each when those with later keys have


def constants(**values: Any) -> Fixed:
    """Numbers as constants; functions and None are ones as they are."""
    return Fixed(**{name: gl.constexpr(x) if isinstance(x, int) else x for name, x in values.items()})
