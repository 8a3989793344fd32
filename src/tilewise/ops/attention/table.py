"""Who can compute attention: the rows in order of preference, and the choice among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise.core import dispatch
from tilewise.core.dispatch import Need, Row, interpreting
from tilewise.ops.attention.facts import facts
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows import (
    cpu,
    cpu_codes,
    decode,
    hopper,
    hopper_codes,
    mixed,
    paged,
    reference,
    triton,
    triton_codes,
)

_EXACT: Need[Call] = Need("no quantize=", lambda c: None if c.scheme is None else type(c.scheme).__name__)
ROWS: tuple[Row[Call], ...] = (
    *(
        replace(row, needs=(_EXACT, *row.needs))
        for row in (
            cpu.SDPA, cpu.TILED, triton.DECODE, mixed.ROW, hopper.ROW, triton.TILED, decode.ROW, paged.ROW,
            reference.ROW,
        )
    ),
    hopper_codes.ROW, cpu_codes.ROW, triton_codes.ROW, reference.CODES,
)  # fmt: skip


def choose(call: Call, impl: str | None) -> Row[Call]:
    """The row that runs a call: the named one, or the first that can; raises InputError or UnsupportedError."""
    if call.signature is None:
        return _choose(call, impl)
    key = (facts(call), impl, call.q.device.type != "cuda" and interpreting())
    row = _chosen.get(key)
    if row is None:
        row = _choose(call, impl)
        if len(_chosen) > 4096:
            _chosen.clear()
        _chosen[key] = row
    return row


_chosen: dict[tuple[Any, ...], Row[Call]] = {}


def _choose(call: Call, impl: str | None) -> Row[Call]:
    return dispatch.choose(ROWS, "attention", call, impl, "; tilewise.why(..., all=True) says what each needs")


def named(impl: str) -> Row[Call]:
    """The row of this name; raises InputError."""
    return dispatch.named(ROWS, impl)
