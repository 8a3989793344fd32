"""Who predicts scores of tokens: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import dataclasses

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import TRITON, Need, Row
from tilewise.ops.operation import Operation, rows_of
from tilewise.ops.token_scores.problem import Call, gradients, results

_CPU, _TRITON, _REFERENCE = rows_of(
    "tilewise.ops.token_scores",
    "triton_token_scores",
    lambda call: call.q.device,
    lambda call: call.least.dtype,
    cpu="PyTorch, one row of queries at a time",
    triton="one program per block of pages and head",
    reference="float64, token by token: the specification",
)


def _no_hopper(call: Call) -> str | None:
    device = call.q.device
    if device.type != "cuda":
        return device.type
    sm = dispatch.capability(device)
    return None if sm == 90 else f"sm_{sm}"


HOPPER: Need[Call] = Need("a Hopper GPU (sm_90)", lambda call: _no_hopper(call))  # found when called: tests replace it
_HOPPER: Row[Call] = Row(
    "hopper",
    "tilewise.ops.token_scores.gluon_token_scores",
    (
        TRITON,
        HOPPER,
        dispatch.dtypes(lambda call: call.least.dtype, torch.float16, torch.bfloat16, torch.float32),
        Need("4-bit codes", lambda call: None if call.bits == 4 else f"{call.bits}"),
        Need("pages of 256 tokens", lambda call: None if call.page_size == 256 else f"{call.page_size}"),
        Need("one query head per KV head", lambda call: None if call.q.shape[2] == 1 else f"{call.q.shape[2]}"),
        Need("a rank of at most 32", lambda call: None if call.q.shape[3] <= 32 else f"{call.q.shape[3]}"),
    ),
    "tensor cores, one warp per page and head",
)
ROWS: tuple[Row[Call], ...] = tuple(
    dataclasses.replace(row, backward=None) for row in (_CPU, _HOPPER, _TRITON, _REFERENCE)
)

SCORE_TOKENS: Operation[Call] = Operation("score_tokens", Call, ROWS, results, gradients, keeps=(), outputs=4)
