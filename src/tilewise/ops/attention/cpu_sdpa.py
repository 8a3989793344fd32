"""Plain and square-causal attention on the CPU by PyTorch's fused kernel alone."""

from __future__ import annotations

import math

import torch

from tilewise.ops.attention.cpu import tiled_backward, tiled_forward
from tilewise.ops.attention.gradient import Gradients
from tilewise.ops.attention.problem import Call


def sdpa_forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's fused CPU kernel: plain or square-causal attention."""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, call.mask is not None, attn_mask=None, scale=call.scale
    )
    if not _finite(lse):  # of such rows alone: bits of others do not depend on them
        bad, (o_tiled, lse_tiled) = ~lse.isfinite(), tiled_forward(call)
        return torch.where(bad.transpose(1, 2)[..., None], o_tiled, o.transpose(1, 2)), torch.where(bad, lse_tiled, lse)
    zero = lse == 0.0  # as PyTorch has it where each score is -inf, but others may be 0, too
    if bool(zero.any()) and bool((o[zero] == 0.0).all(-1).any()):
        return tiled_forward(call)
    return o.transpose(1, 2), lse


def sdpa_backward(
    call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """The fused kernel's own backward; the tiled one when lse has a gradient, or in batch elements with rows that the
    tiled forward did.
    """
    if dlse is not None:
        return tiled_backward(call, o, lse, do, dlse)
    found = _fused_backward(call, o, lse, do)
    if _finite(lse):
        return found
    tiled, good = tiled_backward(call, o, lse, do, None), lse.isfinite().all(-1).all(-1)[:, None, None, None]
    pairs = ((found.dq, tiled.dq), (found.dk, tiled.dk), (found.dv, tiled.dv))
    dq, dk, dv = (torch.where(good, fused, other) for fused, other in pairs)
    return Gradients(dq, dk, dv)


def _fused_backward(call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor) -> Gradients:
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    if call.group > 1:
        k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do.transpose(1, 2),
        q,
        k,
        v,
        o.transpose(1, 2),
        lse,
        0.0,
        call.mask is not None,
        attn_mask=None,
        scale=call.scale,
    )
    if call.group > 1:
        dk, dv = (x.unflatten(1, (-1, call.group)).sum(2) for x in (dk, dv))
    return Gradients(*(x.transpose(1, 2).to(call.q.dtype) for x in (dq, dk, dv)))


def _finite(lse: torch.Tensor) -> bool:
    """Whether no score was NaN or +inf and no row all -inf: there the fused kernel gives 0 in 16 bits, or lse NaN."""
    return math.isfinite(float(lse.sum()))
