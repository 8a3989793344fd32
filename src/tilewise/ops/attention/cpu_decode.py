"""Decoding over pages on a CPU: requests of one query and similar length in one call of PyTorch's fused kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tilewise.formula.evaluate import evaluate
from tilewise.formula.optimize import written_once
from tilewise.ops.attention.cpu_fused import LARGEST, SHORTEST, add_sink
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.variant import CAUSAL

_WASTE = 2  # padded keys for each real one in a call of the kernel


def serves(call: Call) -> bool:
    """Whether the kernel can compute requests of one query, by what is known without looking at numbers."""
    return (
        call.pages is not None
        and call.pages.first is None
        and call.scales is None
        and call.q.dtype == torch.float32
        and call.head_dim == call.head_dim_v
        and call.score is None
        and call.dropout == 0.0
        and call.skip is None
        and not call.batch_invariant
        and call.k.is_contiguous()
        and call.v.is_contiguous()
    )


def forward(call: Call, o: torch.Tensor, lse: torch.Tensor) -> list[int]:
    """Write o and lse of requests that have one query.

    Returns:
        The other requests, those without keys, and those that the kernel cannot compute: where a row meets an infinity
        or NaN.
    """
    assert call.pages is not None
    lengths: list[int] = call.pages.seqlens.tolist()
    rows = list(range(len(lengths)))  # the row of q of each
    if call.cu_seqlens_q is not None:
        rows = call.cu_seqlens_q.tolist()
        counts = [stop - start for start, stop in itertools.pairwise(rows)]
    else:
        counts = [call.q.shape[1]] * len(lengths)
    sizes = list(enumerate(zip(counts, lengths, strict=True)))
    left = [b for b, (count, length) in sizes if count > 1 or (count and not length)]
    ones = [b for b, (count, length) in sizes if count == 1 and length]
    for some in _alike(ones, lengths):
        doubtful = _of_some(call, some, [rows[b] for b in some], [lengths[b] for b in some], o, lse)
        left += [b for b, doubt in zip(some, doubtful.tolist(), strict=True) if doubt]
    return sorted(left)


def _alike(requests: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Groups of requests whose longest has at most _WASTE times the keys of the shortest, or few."""
    group: list[int] = []
    for b in sorted(requests, key=lambda b: lengths[b]):
        if group and lengths[b] > max(_WASTE * lengths[group[0]], SHORTEST):
            yield group
            group = []
        group.append(b)
    if group:
        yield group


def _of_some(
    call: Call, some: list[int], rows: list[int], lengths: list[int], o: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """Write o and lse of requests `some`, whose queries are `rows`; returns which of them are doubtful."""
    count, whole = len(some), rows == list(range(len(call.q)))
    which = torch.tensor(some, device="cpu")
    where = _slots(call, which, lengths, call.k.shape[1])
    q = call.q if whole else call.q[torch.tensor(rows, device="cpu")]
    k, v = (
        x.view(-1, *x.shape[2:]).index_select(0, where.flatten()).view(count, -1, *x.shape[2:]).transpose(1, 2)
        for x in (call.k, call.v)
    )
    found_o, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.reshape(count, call.num_heads_kv, call.group, call.head_dim), k, v, 0.0, False,
        attn_mask=_bias(call, which, lengths, where.shape[1]), scale=call.scale,
    )  # fmt: skip
    rows_o = found_o.reshape(count, 1, call.num_heads_q, call.head_dim)
    rows_lse = found_lse.reshape(count, call.num_heads_q, 1)
    doubtful: torch.Tensor = ~(rows_lse.abs() < LARGEST) | (rows_lse == 0.0) & (rows_o == 0.0).all(-1).transpose(1, 2)
    if call.sink is not None:
        add_sink(call.sink, rows_o, rows_lse)
    doubtful |= ~rows_o.isfinite().all(-1).transpose(1, 2)
    at = slice(None) if whole else torch.tensor(rows, device="cpu")
    o[at] = rows_o.view(count, *o.shape[1:])
    if call.cu_seqlens_q is None:
        lse[at] = rows_lse
    else:
        lse[:, at] = rows_lse[..., 0].t()
    return doubtful.flatten(1).any(1)


def _slots(call: Call, which: torch.Tensor, lengths: list[int], size: int) -> torch.Tensor:
    """(requests, keys) of the longest: where each key lies. Behind a request's last one stands its first: what lies
    there is no other request's, whose NaN would get through weights of 0.
    """
    assert call.pages is not None
    most = max(*lengths, SHORTEST)
    number = -(-most // size)
    pages = call.pages.table[which, :number].long()
    if pages.shape[1] < number:  # of few keys
        pages = torch.nn.functional.pad(pages, (0, number - pages.shape[1]))
    where = (pages[:, :, None] * size + torch.arange(size, device="cpu")).flatten(1)[:, :most]
    if min(lengths) == most:
        return where
    inside = torch.arange(most, device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
    return torch.where(inside, where, where[:, :1])


def _bias(call: Call, which: torch.Tensor, lengths: list[int], most: int) -> torch.Tensor | None:
    """What is added to scores: -inf behind a request's last key, and where the mask hides a key."""
    own = torch.tensor(lengths, device="cpu")[:, None, None, None]
    j = torch.arange(most, device="cpu")
    seen = None if min(lengths) == most else j < own
    if call.mask is not None and call.mask.text != CAUSAL:
        symbols = {
            "b": which[:, None, None, None],
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
