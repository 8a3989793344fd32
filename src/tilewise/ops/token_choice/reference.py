"""The specification, one row and head after another, in float64."""

from __future__ import annotations

import itertools

import torch

from tilewise.ops.token_choice.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for name, nothing in (("tables", 0), ("tokens", 0), ("rest", -torch.inf), ("mean", 0.0)):
        results[name].fill_(nothing)
    size = call.page_size
    for row, head in itertools.product(range(call.total.shape[0]), range(call.heads)):
        request, length = row if call.request is None else int(call.request[row]), int(call.lengths[row])
        best = torch.argsort(call.keys(row, length)[head], descending=True, stable=True)
        read = sorted(best[: call.width].tolist())
        for place, n in enumerate(read):
            page = int(call.table[request, n // size])
            results["tables"][row, head, place] = page * call.by_page + n % size * call.by_token + head * call.by_head
        results["tokens"][row, head] = len(read)
        if call.v_mean is None or not length:
            continue
        weights = torch.softmax(call.scores[row, head, :, :length].double(), -1)
        others = torch.ones(length, dtype=torch.bool)
        others[read] = False
        results["rest"][row, head] = (weights[:, others].sum(-1) / weights[:, read].sum(-1)).log()
        counted = length if call.counted is None else int(call.counted[row])
        total = torch.zeros(call.v_mean.shape[2], dtype=torch.float64, device=call.v_mean.device)
        for n in range(counted):
            total += call.v_mean[int(call.table[request, n // size]), head]
        results["mean"][row, head] = total / length
