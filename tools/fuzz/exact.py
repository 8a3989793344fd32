"""Dense attention of one sequence in PyTorch, at the dtype of what it is given, and what else operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tools.fuzz.case import Tensors, largest
from tools.fuzz.formulas import Change, Visible

_ROUNDING, _JUMP = 2.0**-22, 0.01  # of scores in float32, relative to the largest; of a derivative


@dataclass(frozen=True)
class Rules:
    """How products become weights. `shift` is the position of the first query; None has the last at the last key."""

    scale: float
    visible: Visible | None = None
    change: Change | None = None
    dropout: float = 0.0
    seed: int = 0
    shift: int | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rules: Rules,
    batch: int,
    c: Tensors,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of q (rows, heads, dim) and k, v (keys, heads_kv, dim), with all weights in memory."""
    rows, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    if not keys and sink is None:
        return q.new_zeros(rows, heads, v.shape[-1]), _wide(q.new_full((heads, rows), -torch.inf))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * rules.scale
    at = _places(batch, heads, rows, keys, rules, q.device)
    if keys:
        s = _formula(s, rules, c, at)
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(heads, rows, 1)], -1)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    s = torch.where(empty, 0.0, s)
    lse = torch.where(empty[..., 0], -torch.inf, torch.logsumexp(_wide(s), -1))
    weights = torch.where(empty, 0.0, torch.softmax(s, -1)[..., :keys])
    if rules.dropout:
        kept = survivors(rules, batch, heads, at[2], keys).to(q.device)
        weights = torch.where(kept, weights / (1 - rules.dropout), 0.0)
    return torch.matmul(weights.to(v.dtype), v.transpose(0, 1)).transpose(0, 1), lse


def steepest(q: torch.Tensor, k: torch.Tensor, rules: Rules, batch: int, c: Tensors) -> float:
    """The largest slope that a score has in its scaled product: what errors of gradients are multiplied by."""
    if rules.change is None or not len(q) or not len(k):
        return 1.0
    s, at = _scores(q, k, rules, batch)
    return largest(_slope(s, rules, c, at))


def has_kink(q: torch.Tensor, k: torch.Tensor, rules: Rules, batch: int, c: Tensors) -> bool:
    """Whether some score lies so near a place where the formula's derivative jumps that rounding decides its side."""
    if rules.change is None or not len(q) or not len(k):
        return False
    s, at = _scores(q, k, rules, batch)
    near = _ROUNDING * max(1.0, largest(s))
    return largest(_slope(s + near, rules, c, at) - _slope(s - near, rules, c, at)) > _JUMP


def _scores(
    q: torch.Tensor, k: torch.Tensor, rules: Rules, batch: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(Scores of a sequence before the formula, what the formula sees beside them)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.matmul(q.double().transpose(0, 1), k.double().permute(1, 2, 0)) * rules.scale
    return s, _places(batch, q.shape[1], len(q), len(k), rules, q.device)


def _slope(s: torch.Tensor, rules: Rules, c: Tensors, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The formula's derivative in each score."""
    s = s.detach().requires_grad_()
    changed = _formula(s, replace(rules, visible=None), c, at)
    if not changed.requires_grad:
        return torch.zeros_like(s)
    return torch.autograd.grad(torch.where(changed.isfinite(), changed, 0.0).sum(), s)[0]


def _formula(s: torch.Tensor, rules: Rules, c: Tensors, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if s.dtype == torch.float64 else torch.float32)
    try:
        if rules.change is not None:
            s = torch.as_tensor(rules.change(c, s, *at)).to(s.dtype).expand(s.shape)
        if rules.visible is not None:
            s = torch.where(torch.as_tensor(rules.visible(c, *at), device=s.device), s, -torch.inf)
    finally:
        torch.set_default_dtype(default)
    return s


def _places(
    batch: int, heads: int, rows: int, keys: int, rules: Rules, device: torch.device
) -> tuple[torch.Tensor, ...]:
    first = keys - rows if rules.shift is None else rules.shift
    numbers: Callable[..., torch.Tensor] = lambda *given: torch.arange(*given, device=device)  # noqa: E731
    b, h = torch.tensor(batch, device=device), numbers(heads)[:, None, None]
    return b, h, numbers(first, first + rows)[:, None], numbers(keys)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def survivors(rules: Rules, batch: int, heads: int, i: torch.Tensor, keys: int) -> torch.Tensor:
    """Which weights (heads, rows, keys) dropout leaves: Philox4x32-10 (Salmon et al. 2011) of (key // 4, query, batch *
    heads + head, 0), whose word key % 4 is compared.
    """
    low = np.uint64(0xFFFFFFFF)
    row = (batch * heads + np.arange(heads, dtype=np.int64)).astype(np.uint64)[:, None, None]
    query = (i.cpu().numpy().astype(np.int64) & 0xFFFFFFFF).astype(np.uint64).reshape(1, -1, 1)
    group = np.arange(-(-keys // 4), dtype=np.uint64)
    shape = np.broadcast_shapes(row.shape, query.shape, group.shape)
    x = [np.broadcast_to(part, shape) for part in (group, query, row, np.zeros((), np.uint64))]
    key = [rules.seed & 0xFFFFFFFF, rules.seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        high_a, high_b = a >> np.uint64(32), b >> np.uint64(32)
        x = [high_b ^ x[1] ^ np.uint64(key[0]), b & low, high_a ^ x[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = np.stack(x, -1).reshape(*shape[:2], 4 * shape[2])[..., :keys]
    # the probability has the precision of float32, and the largest limit is the largest such number below 2^32
    limit = int(min(float(np.float32(rules.dropout)) * 2.0**32, 4294967040.0))
    return torch.from_numpy(words >= np.uint64(limit))


def numbers_of(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What codes with a scale for each row stand for; bytes of type uint8 hold two numbers of 4 bits."""
    if data.dtype == torch.uint8:
        low, high = (data & 15).to(scale.dtype) - 8, (data >> 4).to(scale.dtype) - 8
        return torch.cat([low, high], -1) * scale[..., None]
    return data.to(scale.dtype) * scale[..., None]


def numbers_by_channel(
    data: torch.Tensor, scale: torch.Tensor, least: torch.Tensor, opened: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Keys of pages whose channels have a scale and a least number; pages with a place of 0 or more lie in `opened`."""
    in_byte = opened.shape[-1] // data.shape[-1]
    bits = 8 // in_byte
    parts = [(data >> bits * n) & (2**bits - 1) for n in range(in_byte)]
    keys = torch.cat(parts, -1).to(scale.dtype) * scale[:, None] + least[:, None]
    return torch.stack([opened[p] if p >= 0 else keys[n] for n, p in enumerate(place.tolist())])


def coarse(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Each head of x (..., rows, heads, dim) rounded to so many levels on each side of 0, with one scale."""
    if not x.numel():
        return x
    step = x.abs().amax((-3, -1), keepdim=True).clamp(min=1e-6) / levels
    return (x / step).round() * step


def stacked(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], packed: bool) -> Tensors:
    """o and lse of all sequences in the layout of the call."""
    if packed:
        return {"o": torch.cat([o for o, _ in parts]), "lse": torch.cat([lse for _, lse in parts], 1)}
    return {"o": torch.stack([o for o, _ in parts]), "lse": torch.stack([lse for _, lse in parts])}


def turned(x: torch.Tensor, cos: Any, sin: Any, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Heads (tokens, heads, dim) turned by the angles of their positions, in the first 2 * cos.shape[1] dimensions."""
    pairs = cos.shape[1]
    c, s = (table.to(_wide(x).dtype)[positions.long()][:, None] for table in (cos, sin))
    y = _wide(x)
    if interleaved:
        a, b = y[..., 0 : 2 * pairs : 2], y[..., 1 : 2 * pairs : 2]
        both = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = y[..., :pairs], y[..., pairs : 2 * pairs]
        both = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([both, y[..., 2 * pairs :]], -1).to(x.dtype)
