"""Who can merge states: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import NAMED, TRITON, Row
from tilewise.ops.merge.problem import Call


def _device(call: Call) -> torch.device:
    return call.o[0].device


_HERE = "tilewise.ops.merge"

ROWS: tuple[Row[Call], ...] = (
    Row(
        "cpu",
        f"{_HERE}.cpu",
        (dispatch.on("cpu", _device),),
        "PyTorch, state by state",
        backward="backward",
    ),
    Row(
        "triton",
        f"{_HERE}.triton_merge",
        (
            TRITON,
            dispatch.gpu(_device),
            dispatch.dtypes(lambda call: call.dtype, torch.float16, torch.bfloat16, torch.float32),
        ),
        "one pass over the states, one program per block of rows",
        backward="backward",
    ),
    Row(
        "reference",
        f"{_HERE}.reference",
        (),
        "float64, row by row: the specification",
        prefers=(NAMED,),
        backward="backward",
    ),
)


def choose(call: Call, impl: str | None) -> Row[Call]:
    """The row that runs a call: the named one, or the first that can; raises InputError or UnsupportedError."""
    return dispatch.choose(ROWS, "merge", call, impl)
