"""Tokens chosen in PyTorch, one row of queries after another."""

from __future__ import annotations

import torch

from tilewise.ops.token_choice.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for name, x in results.items():
        x.fill_(-torch.inf if name in ("read", "seen") else 0)
    size = call.page_size
    requests = range(call.total.shape[0]) if call.request is None else call.request.tolist()
    heads = torch.arange(call.heads)[:, None]
    counted = (call.lengths if call.counted is None else call.counted).tolist()
    for row, (request, length) in enumerate(zip(requests, call.lengths.tolist(), strict=True)):
        if not length:
            continue
        pages = call.table[request, : -(-length // size)].long()
        read = torch.argsort(call.keys(row, length), dim=-1, descending=True, stable=True)[:, : call.width]
        read = read.sort().values
        places = pages[read // size] * call.by_page + read % size * call.by_token + heads * call.by_head
        results["tables"][row, :, : read.shape[1]] = places.to(torch.int32)
        results["tokens"][row] = read.shape[1]
        if call.v_mean is None:
            continue
        scores = call.scores[row, :, :, :length]
        where = read[:, None].expand(-1, scores.shape[1], -1)
        kept = torch.full_like(scores, -torch.inf).scatter(2, where, scores.gather(2, where))
        for name, x, each in (("read", kept, call.tile), ("seen", scores, call.some * size)):
            sums = torch.stack([some.logsumexp(-1) for some in torch.split(x, each, -1)], -1)
            results[name][row, :, :, : sums.shape[-1]] = sums
        pages = pages[: -(-counted[row] // size)]
        counts = (counted[row] - size * torch.arange(len(pages))).clamp(max=size).float()
        values = counts[:, None, None] * call.v_mean[pages].float()
        for part, some in enumerate(torch.split(values, call.some)):
            results["values"][row, :, part] = some.sum(0)
