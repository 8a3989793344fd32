"""Float64 attention for one head, in plain PyTorch and in row blocks: what every contender's error is taken against.

It takes the mask and the score as plain functions of index tensors, so it shares no code with tilewise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ROWS = 1024


@dataclass(frozen=True)
class Slice:
    """Output and gradients of one (batch, head), each (seqlen, head_dim) in float64."""

    o: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def head_slice(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    *,
    mask: MaskMod | None,
    score: ScoreMod | None,
    batch: int,
    head: int,
) -> Slice:
    """Reference for one head of tensors (batch, seqlen, heads, head_dim) with equal query and key lengths.

    `head` is a query head; dk and dv are those of the key/value head that it reads, from every query head that does.
    """
    group = q.shape[2] // k.shape[2]
    readers = range(head // group * group, (head // group + 1) * group)
    rows_k, rows_v = (t.detach()[batch, :, head // group].double().requires_grad_() for t in (k, v))
    queries = {reader: q.detach()[batch, :, reader].double().requires_grad_() for reader in readers}
    outputs = []
    for reader, rows_q in queries.items():
        grad_o = do[batch, :, reader].double()
        seqlen, head_dim = rows_q.shape
        b, h = (torch.tensor(value, device=q.device) for value in (batch, reader))
        j = torch.arange(seqlen, device=q.device)[None, :]
        for start in range(0, seqlen, ROWS):
            i = torch.arange(start, min(start + ROWS, seqlen), device=q.device)[:, None]
            s = rows_q[start : start + ROWS] @ rows_k.T * head_dim**-0.5
            if score is not None:
                s = score(s, b, h, i, j)
            if mask is not None:
                s = s.masked_fill(~mask(b, h, i, j), float("-inf"))
            o = s.softmax(-1) @ rows_v
            o.backward(grad_o[start : start + ROWS])
            if reader == head:
                outputs.append(o.detach())
    grads = [t.grad for t in (queries[head], rows_k, rows_v) if t.grad is not None]
    return Slice(torch.cat(outputs), *grads)


def visible_pairs(mask: MaskMod | None, seqlen: int, device: str) -> int:
    """How many (query, key) pairs of one head the mask lets meet; the mask must not depend on batch or head."""
    if mask is None:
        return seqlen * seqlen
    zero, total = torch.zeros((), dtype=torch.long, device=device), 0
    j = torch.arange(seqlen, device=device)[None, :]
    for start in range(0, seqlen, ROWS):
        i = torch.arange(start, min(start + ROWS, seqlen), device=device)[:, None]
        total += int(mask(zero, zero, i, j).expand(i.shape[0], seqlen).sum())
    return total


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference."""
    return float((got.double() - want).norm() / want.norm())
