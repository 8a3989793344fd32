"""The row of both Hopper kernels at the same time: prompts beside requests that decode."""

from __future__ import annotations

from tilewise.core.dispatch import Need, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows import decode, hopper
from tilewise.ops.attention.rows.needs import NO_CODES

_MEAN = 256  # queries of a request: batches of more are mostly prompts


def _not_both(call: Call) -> str | None:
    """Whether prompts and requests that decode are likely to be in a batch, whose lengths only the GPU knows."""
    mean = call.rows_q // max(call.batch, 1)
    if call.batch < 2 or mean > _MEAN:
        return f"{call.batch} of {mean} queries in the mean"
    return None if (call.rows_q - call.batch) * call.num_heads_q >= 64 * 128 else f"{call.rows_q} queries in all"


ROW: Row[Call] = Row(
    "hopper_mixed",
    "tilewise.ops.attention.gluon_mixed",
    (
        Need("packed queries over pages", lambda c: None if c.packed and c.pages else "another layout"),
        NO_CODES,
        *dict.fromkeys((*hopper.ROW.needs, *decode.ROW.needs)),
    ),
    "prompts beside requests that decode on Hopper: kernels of many and of few queries at the same time",
    prefers=(Need(f"two or more requests of up to {_MEAN} queries in the mean, some of them with many", _not_both),),
)
