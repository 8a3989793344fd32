"""The rows of the portable kernels for keys in rows."""

from __future__ import annotations

from tilewise.core.dispatch import TRITON, Need, Row
from tilewise.ops.attention.problem import Call, rows_within_reach
from tilewise.ops.attention.rows.needs import (
    ALL_VALUES,
    ANY_BATCH,
    ATOMICS,
    DENSE,
    GPU,
    NO_DROPOUT,
    NO_GRAD,
    UP_TO_FLOAT32,
)


def _few_queries(call: Call) -> str | None:
    rows = call.rows_q * call.group
    return None if rows <= 64 else f"{rows} (seqlen_q {call.rows_q} times group {call.group})"


def _far_apart(call: Call) -> str | None:
    return next((f"{x.stride(-3)}" for x in (call.k, call.v) if not rows_within_reach(x)), None)


DECODE: Row[Call] = Row(
    "triton_decode",
    "tilewise.ops.attention.triton_decode",
    (
        TRITON,
        GPU,
        UP_TO_FLOAT32,
        DENSE,
        Need("at most 64 query rows per KV head", _few_queries),
        Need("rows of keys fewer than 2**24 elements apart", _far_apart),
        NO_DROPOUT,
        NO_GRAD,
        ALL_VALUES,
        ANY_BATCH,
    ),
    "portable split-KV decode: partial results merged by log-sum-exp",
)

TILED: Row[Call] = Row(
    "triton",
    "tilewise.ops.attention.triton_attention",
    (
        TRITON,
        Need("the dense or the packed layout", lambda c: "paged" if c.pages else None),
        GPU,
        UP_TO_FLOAT32,
        ATOMICS,
        ANY_BATCH,
    ),
    "portable tiled kernels, forward and backward",
    backward="backward",
)
