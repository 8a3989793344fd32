"""The specification, one row after another.

Of the tiles that the mask lets a row see, those whose rows are not alike (`least`) are taken anyway, and a row that is
not alike takes all. The others, in the order of their scores, of equal ones the first one first, are taken

    mass:   until their weights, a softmax over their scores, sum to `amount`; all where that is 1, or no score finite;
    count:  until there are `amount`;
    share:  until they are that share of what the mask lets the row see, rounded up;
    weight: while their weight is at least `amount`;

but at least one. Where a score is NaN, or an infinity above all, a row takes whatever it sees.
"""

from __future__ import annotations

import itertools
import math

import torch

from tilewise.ops.select.problem import SLACK, Call
from tilewise.schedule.tilemap import EMPTY

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills kept."""
    batch, heads, rows, tiles = call.scores.shape
    classes = call.classes.expand(batch, heads, rows, tiles)
    for b, h, m in itertools.product(range(batch), range(heads), range(rows)):
        seen = [n for n in range(tiles) if classes[b, h, m, n] != EMPTY]
        results["kept"][b, h, m] = False
        results["kept"][b, h, m, _taken(call, b, h, m, seen)] = True


def _taken(call: Call, b: int, h: int, m: int, seen: list[int]) -> list[int]:
    """Of the tiles that a row sees, those that it takes."""
    least, amount = float(call.least[h]), float(call.amount[h])
    if call.similar_q is not None and not call.similar_q[b, h, m] > least:
        return seen
    scores = {n: float(call.scores[b, h, m, n]) for n in seen}
    if call.similar_k is not None:
        scores = {n: s for n, s in scores.items() if call.similar_k[b, h // call.group, n] > least}
    if any(math.isnan(s) or s == math.inf for s in scores.values()):
        return seen
    anyway = [n for n in seen if n not in scores]
    best = sorted(scores, key=lambda n: -scores[n])  # stable: of equal ones the first
    top = max([s for s in scores.values() if s > -math.inf], default=0.0)
    weights = {n: math.exp(s - top) for n, s in scores.items()}
    total = math.fsum(weights.values())
    taken: list[int] = []
    for n in best:
        so_far = math.fsum(weights[other] for other in taken)
        enough = {
            "mass": amount < 1.0 and total > 0.0 and so_far >= amount * total,
            "count": len(taken) >= amount,
            "share": len(taken) >= math.ceil(amount * SLACK * len(seen)),
            "weight": weights[n] < amount * total,
        }[call.kind]
        if taken and enough:
            break
        taken.append(n)
    return anyway + taken
