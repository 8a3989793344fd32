"""Who can write into pages: one row an implementation, with what each needs. Order is preference.

A row's module has the functions `write` and `copy`.
"""

from __future__ import annotations

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import NAMED, TRITON, Need, Row
from tilewise.ops.kv_write.problem import Call


def _device(call: Call) -> torch.device:
    return call.k_pages.device


def _large_page(call: Call) -> str | None:
    elements = max(pages.shape[1:].numel() for pages in (call.k_pages, call.v_pages))
    return None if elements < 2**31 - 2**11 else str(elements)


_HERE = "tilewise.ops.kv_write"

ROWS: tuple[Row[Call], ...] = (
    Row("cpu", f"{_HERE}.cpu", (dispatch.on("cpu", _device),), "PyTorch, indexed assignment"),
    Row(
        "triton",
        f"{_HERE}.triton_kv_write",
        (TRITON, dispatch.gpu(_device), Need("pages of fewer than 2**31 - 2**11 elements", _large_page)),
        "one launch for keys and values, one program per block of tokens and columns",
    ),
    Row("reference", f"{_HERE}.reference", (), "token by token: the specification", prefers=(NAMED,)),
)


def choose(call: Call, impl: str | None) -> Row[Call]:
    """The row that runs a call: the named one, or the first that can; raises InputError or UnsupportedError."""
    return dispatch.choose(ROWS, "kv_write", call, impl)
