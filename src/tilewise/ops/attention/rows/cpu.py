"""The rows of the CPU."""

from __future__ import annotations

from tilewise.core.dispatch import Need, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import ALL_VALUES, ANY_BATCH, CPU, DENSE, NO_DROPOUT, NO_GRAD_OF_PAGES
from tilewise.ops.attention.variant import CAUSAL


def _plain_or_causal(call: Call) -> str | None:
    if call.score is not None:
        return "a score formula"
    if call.mask is None:
        return None
    if call.mask.text != CAUSAL:
        return "a mask other than causal"
    return None if call.rows_q == call.rows_k else f"causal with seqlen_q {call.rows_q}, seqlen_k {call.rows_k}"


SDPA: Row[Call] = Row(
    "cpu_sdpa",
    "tilewise.ops.attention.cpu_sdpa",
    (
        CPU,
        ALL_VALUES,
        DENSE,
        Need("no sink", lambda c: None if c.sink is None else "a sink"),
        NO_DROPOUT,
        Need("no score formula, and no mask but causal with seqlen_q equal to seqlen_k", _plain_or_causal),
        Need(
            "head_dim_v equal to head_dim",
            lambda c: None if c.head_dim == c.head_dim_v else f"head_dim {c.head_dim}, head_dim_v {c.head_dim_v}",
        ),
        # its vectorised maximum loses NaN in rows shorter than a vector
        Need("seqlen_k of 16 or more", lambda c: None if c.rows_k >= 16 else f"{c.rows_k}"),
        ANY_BATCH,
    ),
    "PyTorch's fused CPU kernel",
    forward="sdpa_forward",
    backward="sdpa_backward",
)

TILED: Row[Call] = Row(
    "cpu_tiled",
    "tilewise.ops.attention.cpu",
    (CPU, NO_GRAD_OF_PAGES),
    "PyTorch's fused kernel with a bias by block where a formula only adds to float32 scores, else a tiled softmax",
    forward="tiled_forward",
    backward="tiled_backward",
    plan="planned",
)
