"""Pages chosen in PyTorch, one row of queries after another."""

from __future__ import annotations

import torch

from tilewise.ops.page_choice.problem import FORCED, Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for name, nothing in (("tables", 0), ("tokens", 0), ("kept", False), ("scores", -torch.inf)):
        results[name].fill_(nothing)
    requests = range(call.q.shape[0]) if call.request is None else call.request.tolist()
    heads = torch.arange(call.heads)[:, None]
    for row, (request, length) in enumerate(zip(requests, call.lengths.tolist(), strict=True)):
        count = -(-length // call.page_size)
        if not count:
            continue
        pages = call.table[request, :count].long()
        q = call.q[row].float().view(call.heads, call.group, 1, -1)
        least, largest = (x[pages].float().transpose(0, 1)[:, None] for x in (call.least, call.largest))
        scores = (q * torch.where(q > 0, largest, least)).sum(-1).amax(1)  # (heads, count)
        scores = torch.where(scores.isfinite(), scores, FORCED)
        scores[:, : call.first], scores[:, max(0, count - call.local) :] = FORCED, FORCED
        best = torch.argsort(scores[:, :-1], dim=-1, descending=True, stable=True)[:, : call.width - 1]
        best = best if call.by_score else best.sort().values
        read = torch.cat([best, torch.full_like(heads, count - 1)], 1)
        width = read.shape[1]
        results["scores"][row, :, :count] = scores
        results["kept"][row] = results["kept"][row].scatter(1, read, True)
        results["tables"][row, :, :width] = (pages[read] * call.by_page + heads * call.by_head).to(torch.int32)
        results["tokens"][row] = width * call.page_size - (count * call.page_size - length)
