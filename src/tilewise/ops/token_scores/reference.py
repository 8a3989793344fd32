"""The specification, one token after another, in float64."""

from __future__ import annotations

import itertools

import torch

from tilewise.ops.token_scores.problem import Call, sample_of, total_of

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for x in results.values():
        x.fill_(-torch.inf)
    size, most = call.page_size, 2**call.bits - 1
    for row, head in itertools.product(range(call.q.shape[0]), range(call.q.shape[1])):
        request, length = row if call.request is None else int(call.request[row]), int(call.lengths[row])
        dims, q = call.dims[row, head].long(), call.q[row, head].double()
        for token in range(length):
            page, place = int(call.table[request, token // size]), token % size
            high, byte = divmod(place, call.columns.shape[-1])
            code = (call.columns[page, head, dims, byte] >> (4 * high) & most).double()
            least, largest = (x[page, head, dims].double() for x in (call.least, call.largest))
            scores = q @ (least + code * (largest - least) / most)
            results["scores"][row, head, :, token] = scores
            if len(scores) > 1:
                results["total"][row, head, token] = scores.sum()
    scores = results["scores"].double()
    runs = scores.view(*scores.shape[:-1], call.runs, call.columns.shape[-1])
    results["lse"].copy_(runs.logsumexp(-1))
    results["sample"].copy_(sample_of(total_of(scores, results["total"])))
