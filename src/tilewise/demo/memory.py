"""What attention keeps for its backward pass, measured: tilewise, PyTorch's fused kernel and scores in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise

SEQLEN, WINDOW = 2048, 256
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kept:
    """Bytes that one call of attention keeps for its backward pass beside q, k and v, of ways that do the same work.

    Attributes:
        mask: the mask's name.
        seqlen: queries and keys.
        bytes: by way: "tilewise", "sdpa" (torch.nn.functional.scaled_dot_product_attention) and "scores" (the matrix of
            scores in memory).
        difference: the largest difference of their outputs.
    """

    mask: str
    seqlen: int
    bytes: dict[str, int]
    difference: float


def kept(function: Function, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, Tensor]:
    """Bytes of the tensors that autograd keeps of a call, without q, k and v themselves, and the call's output."""
    given = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function(q, k, v)
    return sum(found.values()), out.detach()


def measure(device: torch.device, heads_q: int, heads_kv: int, head_dim: int, *, seqlen: int = SEQLEN) -> list[Kept]:
    """Measure causal attention, and causal attention within a window, of one sequence in float32.

    Args:
        device: where it runs.
        heads_q, heads_kv, head_dim: q is (1, seqlen, heads_q, head_dim), k and v (1, seqlen, heads_kv, head_dim).
        seqlen: queries and keys.

    Returns:
        What each way keeps, once for each mask.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, seqlen, heads, head_dim, generator=draw).to(device).requires_grad_()
        for heads in (heads_q, heads_kv, heads_kv)
    )
    i = torch.arange(seqlen, device=device)
    past = i[:, None] >= i
    near = past & (i[:, None] - i < WINDOW)
    causal = {"is_causal": True}
    return [
        _measured("causal", tilewise.causal, past, causal, (q, k, v)),
        _measured(f"causal & window({WINDOW})", tilewise.causal & tilewise.window(WINDOW), near, {}, (q, k, v)),
    ]


def _measured(
    name: str, mask: tilewise.Mask, visible: Tensor, flags: dict[str, bool], tensors: tuple[Tensor, Tensor, Tensor]
) -> Kept:
    """`visible` is the mask as bool (seqlen, seqlen); `flags` say it to SDPA, which else takes it as a tensor."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given: dict[str, Any] = {"enable_gqa": True, **(flags or {"attn_mask": visible})}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2)

    def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = q.shape[2] // k.shape[2]
        rows, keys, values = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(shared, 2) for x in (k, v))))
        s = (rows @ keys.mT) / math.sqrt(q.shape[-1])
        return (s.masked_fill(~visible, -math.inf).softmax(-1) @ values).transpose(1, 2)

    ways: dict[str, Function] = {
        "tilewise": lambda q, k, v: tilewise.attention(q, k, v, mask=mask),
        "sdpa": sdpa,
        "scores": scores,
    }
    measured = {way: kept(function, *tensors) for way, function in ways.items()}
    outputs = [out for _, out in measured.values()]
    difference = max(float((out - outputs[0]).abs().max()) for out in outputs)
    return Kept(name, tensors[0].shape[1], {way: size for way, (size, _) in measured.items()}, difference)
