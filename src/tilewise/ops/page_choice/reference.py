"""The specification, one page after another: its score is the largest of those of a group's query heads, each the sum
over dimensions of a query's number times the largest of the page's keys, or where that is not positive the least.
"""

from __future__ import annotations

import itertools

import torch

from tilewise.ops.page_choice.problem import FORCED, Call

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    for name, nothing in (("tables", 0), ("tokens", 0), ("kept", False), ("scores", -torch.inf)):
        results[name].fill_(nothing)
    for row, head in itertools.product(range(call.q.shape[0]), range(call.heads)):
        request = row if call.request is None else int(call.request[row])
        length = int(call.lengths[row])
        count = -(-length // call.page_size)
        scores = []
        for n in range(count):
            page = int(call.table[request, n])
            q = call.q[row, head * call.group : (head + 1) * call.group].double()
            least, largest = (x[page, head].double() for x in (call.least, call.largest))
            score = (q * torch.where(q > 0, largest, least)).sum(-1).amax().float()
            forced = n < call.first or n >= count - call.local or not score.isfinite()
            scores.append(FORCED if forced else float(score))
        best = sorted(range(count - 1), key=lambda n: -scores[n])[: call.width - 1]
        read = [*(best if call.by_score else sorted(best)), *range(count)[-1:]]
        results["scores"][row, head, :count] = torch.tensor(scores)
        for place, n in enumerate(read):
            page = int(call.table[request, n])
            results["tables"][row, head, place] = page * call.by_page + head * call.by_head
            results["tokens"][row, head] += min(call.page_size, length - n * call.page_size)
            results["kept"][row, head, n] = True
