"""The row of both Hopper kernels at the same time: prompts beside requests that decode."""

from __future__ import annotations

from tilewise.core.dispatch import Need, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows import decode, hopper
from tilewise.ops.attention.rows.needs import NO_CODES

_ROWS, _MEAN = 64, 256  # rows of the mean request that decodes, or is verified, at most; queries of one with prompts


def _not_both(call: Call) -> str | None:
    """Whether a batch is likely to have no prompt, or prompts alone: only the GPU knows its lengths."""
    mean = call.rows_q // max(call.batch, 1)
    few = call.rows_q * call.group // max(call.batch, 1) <= _ROWS
    return f"{call.batch} of {mean} queries in the mean" if call.batch < 2 or few or mean > _MEAN else None


ROW: Row[Call] = Row(
    "hopper_mixed",
    "tilewise.ops.attention.gluon_mixed",
    (
        Need("packed queries over pages", lambda c: None if c.packed and c.pages else "another layout"),
        NO_CODES,
        *dict.fromkeys((*hopper.ROW.needs, *decode.ROW.needs)),
    ),
    "mixed batches on Hopper: the kernels for prefill and for decode run at the same time",
    prefers=(
        Need(
            f"two or more requests, on average of more than {_ROWS} query rows per KV head and at most {_MEAN} queries",
            _not_both,
        ),
    ),
)
