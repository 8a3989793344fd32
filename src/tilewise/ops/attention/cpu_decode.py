"""Decoding over pages on a CPU: requests of one query and similar length in one call of PyTorch's fused kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.formula.evaluate import evaluate
from tilewise.formula.optimize import written_once
from tilewise.ops.attention.cpu_fused import LARGEST, SHORTEST, add_sink
from tilewise.ops.attention.problem import Call, check_values
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


@dataclass(frozen=True)
class Group:
    """Requests of one query and similar length: what every layer's call has in common."""

    requests: list[int]
    rows: torch.Tensor | None  # of q, one for each request; None where these are all rows
    where: torch.Tensor  # (requests * keys,): where each key lies in the pool
    bias: torch.Tensor | None  # added to scores

    @staticmethod
    def of(call: Call, requests: list[int], rows: list[int], lengths: list[int]) -> Group:
        """Of some requests, whose queries are `rows`."""
        which = torch.tensor(requests, device="cpu")
        where = _slots(call, which, lengths, call.k.shape[1])
        whole = rows == list(range(len(call.q)))
        return Group(
            requests,
            None if whole else torch.tensor(rows, device="cpu"),
            where.flatten(),
            _bias(call, which, lengths, where.shape[1]),
        )


class Decoding(NamedTuple):
    """The requests of one query in groups, and all others that have queries."""

    groups: list[Group]
    others: list[int]


def prepare(call: Call) -> Decoding:
    """Read lengths and pages; of keys and values nothing."""
    assert call.pages is not None
    lengths: list[int] = call.pages.seqlens.tolist()
    rows = list(range(len(lengths)))  # the row of q of each
    if call.cu_seqlens_q is not None:
        rows = call.cu_seqlens_q.tolist()
        counts = [stop - start for start, stop in itertools.pairwise(rows)]
    else:
        counts = [call.q.shape[1]] * len(lengths)
    sizes = list(enumerate(zip(counts, lengths, strict=True)))
    others = [b for b, (count, length) in sizes if count > 1 or (count and not length)]
    ones = [b for b, (count, length) in sizes if count == 1 and length]
    groups = [
        Group.of(call, some, [rows[b] for b in some], [lengths[b] for b in some]) for some in _alike(ones, lengths)
    ]
    return Decoding(groups, others)


def forward(call: Call, decoding: Decoding, o: torch.Tensor, lse: torch.Tensor) -> list[int]:
    """Write o and lse of requests that have one query.

    Returns:
        The other requests, those without keys, and those that the kernel cannot compute: where a row meets an infinity
        or NaN.
    """
    left = list(decoding.others)
    for group in decoding.groups:
        doubtful = _of_group(call, group, o, lse)
        if doubtful is not None:
            left += [b for b, doubt in zip(group.requests, doubtful.tolist(), strict=True) if doubt]
    return sorted(left)


class Planned:
    """What runs of a plan share, as long as lengths and pages stay the same.

    Args:
        call: an example.
        attend: gives (o, lse) of a call, with what `prepare` found.
    """

    def __init__(self, call: Call, attend: Callable[[Call, Decoding], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._attend = attend
        self.update(call)

    def update(self, call: Call) -> None:
        """For the lengths and pages that there are now."""
        self._index = [x.clone() for x in self._index_of(call)]
        self._decoding = prepare(call)

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of one run."""
        same = all(torch.equal(x, y) for x, y in zip(self._index_of(call), self._index, strict=True))
        if not same:
            check_values(call)
            self.update(call)
        return self._attend(call, self._decoding)

    def _index_of(self, call: Call) -> list[torch.Tensor]:
        """All that `prepare` reads."""
        assert call.pages is not None
        masking = () if call.mask is None else call.mask.tensors
        found = (call.pages.table, call.pages.seqlens, call.cu_seqlens_q, *masking)
        return [x for x in found if x is not None]


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


def _of_group(call: Call, group: Group, o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | None:
    """Write o and lse of a group; returns which of its requests are doubtful, None for none."""
    count, rows = len(group.requests), group.rows
    q = call.q if rows is None else call.q[rows]
    k, v = (
        x.view(-1, *x.shape[2:]).index_select(0, group.where).view(count, -1, *x.shape[2:]).transpose(1, 2)
        for x in (call.k, call.v)
    )
    found_o, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.reshape(count, call.num_heads_kv, call.group, call.head_dim), k, v, 0.0, False, attn_mask=group.bias,
        scale=call.scale,
    )  # fmt: skip
    rows_o = found_o.reshape(count, 1, call.num_heads_q, call.head_dim)
    rows_lse = found_lse.reshape(count, call.num_heads_q, 1)
    doubtful = None
    if not _plain(rows_o, rows_lse):
        zero = (rows_lse == 0.0) & (rows_o == 0.0).all(-1).transpose(1, 2)
        doubtful = ~(rows_lse.abs() < LARGEST) | zero | ~rows_o.isfinite().all(-1).transpose(1, 2)
    if call.sink is not None:
        add_sink(call.sink, rows_o, rows_lse)
    at = slice(None) if rows is None else rows
    o[at] = rows_o.view(count, *o.shape[1:])
    if call.cu_seqlens_q is None:
        lse[at] = rows_lse
    else:
        lse[:, at] = rows_lse[..., 0].t()
    return None if doubtful is None else doubtful.flatten(1).any(1)


def _plain(o: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether all is finite, and no row looks like one whose scores are all -inf: for most calls, in few operations."""
    low, high = (float(x) for x in torch.aminmax(lse))
    some_zero = low <= 0.0 <= high and bool((lse == 0.0).any())
    return -LARGEST < low <= high < LARGEST and not some_zero and math.isfinite(float(o.sum()))


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
    """What is added to scores, None for nothing: -inf behind a request's last key, and where the mask hides a key."""
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
