"""The specification: attention in float64, every score materialised, one batch element at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.core.philox import keep_mask
from tilewise.formula.evaluate import evaluate
from tilewise.formula.limits import MOST
from tilewise.ops.attention.gradient import Gradients
from tilewise.ops.attention.problem import Call, requests, sequences


def attention_reference(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) in float64, differentiable by autograd in q, k, v, sink and captured tensors."""
    if call.pages is not None:
        outputs = [_one(one, one.q[0], one.k[0], one.v[0], one.first_batch) for one, _ in requests(call)]
    elif call.packed:
        outputs = [_one(call, call.q[rows], call.k[keys], call.v[keys], b) for b, rows, keys in sequences(call)]
    else:
        outputs = [_one(call, call.q[b], call.k[b], call.v[b], b) for b in range(call.batch)]
    if call.packed:
        empty = call.q.new_zeros((0, call.num_heads_q, call.head_dim_v), dtype=torch.float64)
        o = torch.cat([o for o, _ in outputs] or [empty], 0)
        return o, torch.cat([lse for _, lse in outputs] or [empty[..., 0].T], 1)
    if not outputs:
        return call.new_output().double(), call.new_lse().double()
    return torch.stack([o for o, _ in outputs]), torch.stack([lse for _, lse in outputs])


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference as an implementation: rounded to the dtypes of a call."""
    with torch.no_grad():
        o, lse = attention_reference(call)
    return o.to(call.q.dtype), lse.to(call.new_lse().dtype)


def backward(call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients by PyTorch's autograd through the reference, in float64."""
    score_tensors = () if call.score is None else call.score.tensors
    leaves = [x.detach().double().requires_grad_() for x in (call.q, call.k, call.v)]
    sink = None if call.sink is None else call.sink.detach().double().requires_grad_()
    captured = [
        t.detach().double().requires_grad_() if wanted else t
        for t, wanted in zip(score_tensors, call.grad_captured or [False] * len(score_tensors), strict=True)
    ]
    score = None if call.score is None else call.score._replace(tensors=tuple(captured))
    with torch.enable_grad():
        outputs = attention_reference(replace(call, q=leaves[0], k=leaves[1], v=leaves[2], sink=sink, score=score))
    upstream = (do.double(), torch.zeros_like(outputs[1]) if dlse is None else dlse.double())
    pairs = [(x, g) for x, g in zip(outputs, upstream, strict=True) if x.requires_grad]  # lse of a constant score: not
    wanted = [*leaves, *([sink] if sink is not None else []), *(t for t in captured if t.requires_grad)]
    connected, upstream = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(connected, wanted, upstream, allow_unused=True, materialize_grads=True))
    dq, dk, dv = (next(found).to(call.q.dtype) for _ in range(3))
    dsink = next(found).to(call.sink.dtype) if call.sink is not None else None
    dcaptured = [
        next(found).to(t.dtype) if c.requires_grad else None for t, c in zip(score_tensors, captured, strict=True)
    ]
    return Gradients(dq, dk, dv, dsink if call.grad_sink else None, dcaptured)


def _one(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    seqlen_q, seqlen_k, heads = q.shape[0], k.shape[0], q.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(call.group, 1), v.double().repeat_interleave(call.group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * call.scale  # (heads, seqlen_q, seqlen_k)

    symbols = {
        "b": torch.tensor(b, device=q.device),
        "h": torch.arange(heads, device=q.device)[:, None, None],
        "i": torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)[:, None],
        "j": torch.arange(seqlen_k, device=q.device),
    }
    both = seqlen_q > 0 and seqlen_k > 0  # for which alone formulas are proved to read inside
    if call.score is not None and both:
        root = call.score.structure.root
        s = evaluate([root], {**symbols, "s": s}, call.score.tensors, call.score.numbers, torch.float64)[0].expand_as(s)
        s = torch.where(s < -MOST, -torch.inf, s)
    if call.mask is not None and both:
        visible = evaluate([call.mask.structure.root], symbols, call.mask.tensors, call.mask.numbers, torch.float64)[0]
        s = torch.where(visible, s, -torch.inf)

    if call.sink is not None:
        s = torch.cat([s, call.sink.double()[:, None, None].expand(heads, seqlen_q, 1)], -1)
    if s.shape[-1] == 0:
        return q.new_zeros(seqlen_q, heads, v.shape[-1]), q.new_full((heads, seqlen_q), -torch.inf)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    s = torch.where(empty, 0.0, s)
    lse = torch.logsumexp(s, -1)  # (heads, seqlen_q)
    p = torch.where(empty, 0.0, torch.softmax(s, -1)[..., :seqlen_k])  # not by lse, which large scores round
    lse = torch.where(empty[..., 0], -torch.inf, lse)
    if call.dropout > 0.0:
        assert call.seed is not None
        row = (b * heads + symbols["h"]).to(torch.int64)
        keep = keep_mask(int(call.seed), call.dropout, row, symbols["i"], symbols["j"])
        p = torch.where(keep, p / (1.0 - call.dropout), 0.0)
    return torch.einsum("hij,jhd->ihd", p, v), lse
