"""Scores of tokens on Hopper: the plan of the Gluon kernel."""

from __future__ import annotations

import torch

from tilewise.ops.token_scores import triton_token_scores
from tilewise.ops.token_scores.gluon_sm90_token_scores import score_tokens_sm90
from tilewise.ops.token_scores.problem import Call
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.early import early_for

_PLANS = Plans()
_PAGES = 4  # of a program, which has a warp for each


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results. Columns that do not start at 16 bytes, portable kernels read."""
    if call.columns.data_ptr() % 16:
        triton_token_scores.forward(call, results)
        return
    q, dims = call.q.contiguous(), call.dims.contiguous()
    tensors = (
        q, dims, call.columns, call.least, call.largest, call.table, call.request, call.lengths, results["scores"],
        results["lse"], results["sample"],
    )  # fmt: skip
    key = tensors_key(*(x for x in tensors if x is not None))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _plan(call))
    with on_device(q):
        plan.launch(tensors, ())


def _plan(call: Call) -> Plan:
    rows, heads, _, rank = call.q.shape
    pages = call.table.shape[1]
    parts = -(-pages // _PAGES)
    early = early_for(call.q.device)
    strides = (*call.least.stride()[:2], call.table.stride(0))
    constants = (heads, rank, 16 if rank <= 16 else 32, call.least.shape[2], _PAGES, early)
    return Plan(score_tokens_sm90, rows * heads * parts, strides, (pages, parts), constants, _PAGES, 1, early=early > 0)
