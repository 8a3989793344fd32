"""Who runs `qkv_prologue`: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import NAMED, TRITON, Need, Row
from tilewise.ops.qkv_prologue.problem import Call


def _device(call: Call) -> torch.device:
    return call.q.device


def _by_channel(call: Call) -> str | None:
    return None if call.write.channels is None else "a ByChannel"


def _wide(call: Call) -> str | None:
    return None if call.q.shape[2] <= WIDEST else str(call.q.shape[2])


WIDEST = 1024  # a program has whole heads in registers
_HERE = "tilewise.ops.qkv_prologue"

ROWS: tuple[Row[Call], ...] = (
    Row("cpu", f"{_HERE}.cpu", (dispatch.on("cpu", _device),), "PyTorch, queries and keys as one tensor"),
    Row(
        "triton",
        f"{_HERE}.triton_qkv_prologue",
        (
            TRITON,
            dispatch.gpu(_device),
            Need("no keys by channel", _by_channel),
            Need(f"head dimensions up to {WIDEST}", _wide),
        ),
        "one launch, one program per block of heads of q, k or v",
    ),
    Row("apart", f"{_HERE}.apart", (), "norms, kv_write and rope, one after another"),
    Row("reference", f"{_HERE}.reference", (), "head by head: the specification", prefers=(NAMED,)),
)


def choose(call: Call, impl: str | None) -> Row[Call]:
    """The row that runs a call: the named one, or the first that can; raises InputError or UnsupportedError."""
    return dispatch.choose(ROWS, "qkv_prologue", call, impl)


def run(row: Row[Call], call: Call) -> torch.Tensor:
    """The queries; afterwards autograd knows that the pages are others."""
    if not call.q.numel():
        return torch.empty_like(call.q)
    q: torch.Tensor = row.function(row.forward)(call)
    torch.autograd.graph.increment_version([pages for pages in call.write.changed if not pages.is_inference()])
    return q
