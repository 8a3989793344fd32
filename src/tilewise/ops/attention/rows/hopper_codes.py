"""The row of Hopper's kernel in few bits."""

from __future__ import annotations

from tilewise.core.dispatch import TRITON, Need, Row
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import ANY_BATCH, HALF, HOPPER, NO_DROPOUT, SCHEME


def _other_dims(call: Call) -> str | None:
    dims = (call.head_dim, call.head_dim_v)
    return None if all(32 <= d <= 256 and d % 16 == 0 for d in dims) else f"{dims[0]}, {dims[1]}"


def _other_values(call: Call) -> str | None:
    return None if call.scheme is None or call.scheme.pv == "fp8" else f'pv="{call.scheme.pv}"'


def _centred_queries(call: Call) -> str | None:
    return "smooth with q" if call.scheme is not None and "q" in call.scheme.smooth else None


ROW: Row[Call] = Row(
    "hopper_codes",
    "tilewise.ops.attention.gluon_codes",
    (
        SCHEME,
        NO_DROPOUT,
        ANY_BATCH,
        TRITON,
        HOPPER,
        HALF,
        Need("head dimensions of 32 to 256, multiples of 16", _other_dims),
        Need('pv="fp8"', _other_values),
        Need("a scheme that does not smooth queries", _centred_queries),
    ),
    "warp-specialised quantized kernel for Hopper: QK in INT8 or FP8, PV in FP8, accumulators flushed after each tile",
    backward="backward",
)
