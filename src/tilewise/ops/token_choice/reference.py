"""The specification, one row and head after another, in float64."""

from __future__ import annotations

import itertools

import torch

from tilewise.ops.token_choice.problem import Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for name, x in results.items():
        x.fill_(-torch.inf if name in ("read", "seen") else 0)
    size = call.page_size
    for row, head in itertools.product(range(call.total.shape[0]), range(call.heads)):
        request, length = row if call.request is None else int(call.request[row]), int(call.lengths[row])
        best = torch.argsort(call.keys(row, length)[head], descending=True, stable=True)
        read = sorted(best[: call.width].tolist())
        for place, n in enumerate(read):
            page = int(call.table[request, n // size])
            results["tables"][row, head, place] = page * call.by_page + n % size * call.by_token + head * call.by_head
        results["tokens"][row, head] = len(read)
        if call.v_mean is None:
            continue
        scores = call.scores[row, head].double()
        for tile in range(call.tiles):
            of_tile = [n for n in read if n // call.tile == tile]
            results["read"][row, head, :, tile] = scores[:, of_tile].logsumexp(-1)
        counted = length if call.counted is None else int(call.counted[row])
        tokens = call.some * size
        for part in range(call.parts):
            first, end = part * tokens, (part + 1) * tokens
            results["seen"][row, head, :, part] = scores[:, first : min(end, length)].logsumexp(-1)
            total = torch.zeros(call.v_mean.shape[2], dtype=torch.float64, device=call.v_mean.device)
            for n in range(first, min(end, counted)):
                total += call.v_mean[int(call.table[request, n // size]), head]
            results["values"][row, head, part] = total
