"""Decoding over pages on a CPU: one query of each request, all requests in one call of PyTorch's fused kernel."""

from __future__ import annotations

import torch

from tilewise.formula.evaluate import evaluate
from tilewise.formula.optimize import written_once
from tilewise.ops.attention.cpu_fused import LARGEST, SHORTEST, add_sink
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.variant import CAUSAL

_WASTE = 2  # padded keys for each real one, beyond which requests are computed one by one


def lengths_of(call: Call) -> list[int] | None:
    """Keys of each request, where the kernel can compute a paged call and it pays; else None."""
    pages = call.pages
    if (
        pages is None
        or pages.first is not None
        or call.scales is not None
        or call.q.dtype != torch.float32
        or call.head_dim != call.head_dim_v
        or call.score is not None
        or call.dropout > 0.0
        or call.skip is not None
        or call.batch_invariant
        or not (call.k.is_contiguous() and call.v.is_contiguous())
    ):
        return None
    found: list[int] = pages.seqlens.tolist()
    padded = max(found, default=0) * len(found)
    each = call.q.shape[1] == 1 if call.cu_seqlens_q is None else _each_has_one(call.cu_seqlens_q)
    return found if each and found and min(found) > 0 and padded <= _WASTE * sum(found) else None


def _each_has_one(cu_seqlens_q: torch.Tensor) -> bool:
    return cu_seqlens_q.tolist() == list(range(len(cu_seqlens_q)))


def forward(call: Call, lengths: list[int], o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Write o and lse.

    Returns:
        bool (requests,), those that the kernel cannot compute: where a row meets an infinity or NaN.
    """
    count, size = len(lengths), call.k.shape[1]
    where = _slots(call, lengths, size)
    of_heads = (count, call.num_heads_kv, call.group, call.head_dim)
    q = call.q.reshape(of_heads)
    k, v = (
        x.view(-1, *x.shape[2:]).index_select(0, where.flatten()).view(count, -1, *x.shape[2:]).transpose(1, 2)
        for x in (call.k, call.v)
    )
    found_o, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=_bias(call, lengths, where.shape[1]), scale=call.scale
    )
    rows_o = found_o.reshape(count, 1, call.num_heads_q, call.head_dim)
    rows_lse = found_lse.reshape(count, call.num_heads_q, 1)
    doubtful: torch.Tensor = ~(rows_lse.abs() < LARGEST) | (rows_lse == 0.0) & (rows_o == 0.0).all(-1).transpose(1, 2)
    if call.sink is not None:
        add_sink(call.sink, rows_o, rows_lse)
    doubtful |= ~rows_o.isfinite().all(-1).transpose(1, 2)
    o.copy_(rows_o.view(o.shape))
    lse.copy_(rows_lse if call.cu_seqlens_q is None else rows_lse[..., 0].t())
    return doubtful.flatten(1).any(1)


def _slots(call: Call, lengths: list[int], size: int) -> torch.Tensor:
    """(requests, keys) of the longest: where each key lies. Behind a request's last one stands its first: what lies
    there is no other request's, whose NaN would get through weights of 0.
    """
    assert call.pages is not None
    most = max(*lengths, SHORTEST)
    number = -(-most // size)
    pages = call.pages.table[:, :number].long()
    if pages.shape[1] < number:  # of few keys
        pages = torch.nn.functional.pad(pages, (0, number - pages.shape[1]))
    where = (pages[:, :, None] * size + torch.arange(size, device="cpu")).flatten(1)[:, :most]
    if min(lengths) == most:
        return where
    inside = torch.arange(most, device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
    return torch.where(inside, where, where[:, :1])


def _bias(call: Call, lengths: list[int], most: int) -> torch.Tensor | None:
    """What is added to scores: -inf behind a request's last key, and where the mask hides a key."""
    own = torch.tensor(lengths, device="cpu")[:, None, None, None]
    j = torch.arange(most, device="cpu")
    seen = None if min(lengths) == most else j < own
    if call.mask is not None and call.mask.text != CAUSAL:
        symbols = {
            "b": torch.arange(len(lengths), device="cpu")[:, None, None, None],
            "h": torch.arange(call.num_heads_q, device="cpu").view(call.num_heads_kv, call.group, 1),
            "i": own - 1,
            "j": j.minimum(own - 1),  # a captured tensor has no more
        }
        tensors = [x.detach() for x in call.mask.tensors]
        (shown,) = evaluate(
            [written_once(call.mask.structure.root)], symbols, tensors, call.mask.numbers, torch.float32
        )
        seen = shown if seen is None else seen & shown
    if seen is None:
        return None
    shape = (len(lengths), call.num_heads_kv, call.group, most)
    return torch.zeros(seen.shape, device="cpu").masked_fill_(~seen, -torch.inf).expand(shape)
