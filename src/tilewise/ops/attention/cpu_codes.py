"""Attention over codes on the CPU: the numbers that codes stand for, and weights rounded as the scheme says. Errors are
those of the scheme; it is no faster than exact attention.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.ops.attention.codes import backward as backward
from tilewise.ops.attention.codes import encoded
from tilewise.ops.attention.cpu import tiled_forward
from tilewise.ops.attention.problem import Call
from tilewise.ops.quantize.problem import NUMBERS


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse): products in float32, weights and values in the scheme's codes."""
    assert call.scheme is not None
    x = encoded(call)
    q, k, _ = x.numbers(torch.float32)
    kind, most = call.scheme.pv, call.scheme.p_largest

    def of_weights(p: torch.Tensor) -> torch.Tensor:
        if kind in NUMBERS:
            return p.to(NUMBERS[kind]).float()
        return (p * most).to(torch.float8_e4m3fn).float() / most

    o, lse = tiled_forward(replace(call, q=q, k=k, v=x.values(torch.float32)), of_weights)
    if x.v_mean is not None:  # weights of a row that sees a key are 1 in all, less what its sink has
        share = torch.where(lse == -torch.inf, 0.0, 1.0)
        if call.sink is not None:
            share -= torch.exp(call.sink.detach().float().view(-1, 1) - lse).nan_to_num()
        means = x.of_sequences(x.v_mean, "q", torch.float32).repeat_interleave(call.group, -2)
        o += means * share.transpose(-1, -2).unsqueeze(-1)
    return o.to(call.q.dtype), lse
