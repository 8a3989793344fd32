"""What stands for the rest in PyTorch."""

from __future__ import annotations

import torch

from tilewise.ops.token_rest.problem import Call


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    wide = torch.promote_types(call.o.dtype, torch.float32)
    o = call.o.to(wide).view(call.o.shape[0], call.heads, call.group, -1)
    lse = call.lse.view(o.shape[:3])
    more = call.seen.to(wide).logsumexp(-1) - call.read.to(wide).logsumexp(-1)
    added = (more > 0) & (lse > -torch.inf) & (call.lengths > call.width)[:, None, None]
    total = call.values.to(wide).sum(2)
    if call.last is not None:
        total = total + call.last
    mean = total / call.lengths.clamp(min=1)[:, None, None]
    share = torch.exp(-more)[..., None]
    found = torch.where(added[..., None], share * o + (1.0 - share) * mean[:, :, None], o)
    results["o"].copy_(found.reshape(call.o.shape))
    results["lse"].copy_(torch.where(added, lse + more, lse).reshape(call.lse.shape))
