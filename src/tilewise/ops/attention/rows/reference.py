"""The rows of the specification."""

from __future__ import annotations

from tilewise.core.dispatch import NAMED, Need, Row
from tilewise.core.tensors import recorded
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import ALL_VALUES, ANY_BATCH, NO_DROPOUT, SCHEME

ROW: Row[Call] = Row(
    "reference",
    "tilewise.ops.attention.reference",
    (
        Need(
            "no gradients inside torch.compile",
            lambda c: "gradients wanted" if c.wants_grad and recorded((c.q,)) else None,
        ),
        ALL_VALUES,
        Need("no gradients with encoded keys", lambda c: "gradients wanted" if c.wants_grad and c.scales else None),
    ),
    "float64, every score materialised: the specification",
    prefers=(NAMED,),
    backward="backward",
)

CODES: Row[Call] = Row(
    "reference_codes",
    "tilewise.ops.attention.reference_codes",
    (SCHEME, ALL_VALUES, NO_DROPOUT, ANY_BATCH),
    "float64 over the codes, every score materialised: the specification of quantized attention",
    prefers=(NAMED,),
    backward="backward",
)
