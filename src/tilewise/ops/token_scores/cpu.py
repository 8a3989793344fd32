"""Scores of tokens in PyTorch, one row of queries after another."""

from __future__ import annotations

import torch

from tilewise.ops.token_scores.problem import Call, sample_of, total_of

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for x in results.values():
        x.fill_(-torch.inf)
    requests = range(call.q.shape[0]) if call.request is None else call.request.tolist()
    heads = torch.arange(call.q.shape[1])[:, None]
    for row, (request, length) in enumerate(zip(requests, call.lengths.tolist(), strict=True)):
        pages, dims = call.table[request, : -(-length // call.page_size)].long(), call.dims[row].long()
        codes = call.columns[pages][:, heads, dims]  # (pages, heads, rank, bytes)
        if call.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], -1)
        least, largest = (x[pages][:, heads, dims].float()[..., None] for x in (call.least, call.largest))
        keys = least + codes * ((largest - least) / (2**call.bits - 1))
        scores = torch.einsum("hgr,nhrs->hgns", call.q[row], keys).flatten(2)[..., :length]
        results["scores"][row, ..., :length] = scores
        if call.q.shape[2] > 1:
            results["total"][row, :, :length] = scores.sum(1)
    scores = results["scores"]
    runs = scores.view(*scores.shape[:-1], call.runs, call.columns.shape[-1])
    results["lse"].copy_(runs.logsumexp(-1))
    results["sample"].copy_(sample_of(total_of(scores, results["total"])))
