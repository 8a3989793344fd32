"""Tensors for a case: the same values on any device and, through their rounding, in any precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilewise.layouts import Packed
from tilewise.testing.case import Case, Maker, Spelled

SEED = 1234  # of dropout


@dataclass
class Inputs:
    """What one call of attention takes, its upstream gradients, and the same formulas as plain functions."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor | None
    sink: torch.Tensor | None
    mask: Spelled | None
    score: Spelled | None
    captured: list[torch.Tensor]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `tilewise.attention`."""
        case = self.case
        found: dict[str, Any] = {"scale": case.scale, "dropout": case.dropout}
        if case.dropout:
            found["seed"] = SEED
        if self.mask is not None:
            found["mask"] = self.mask.formula
        if self.score is not None:
            found["score"] = self.score.formula
        if self.sink is not None:
            found["sink"] = self.sink
        if case.packed is not None:
            cu_q, cu_k = (cumulative([pair[axis] for pair in case.packed], self.q.device) for axis in (0, 1))
            found["layout"] = Packed(cu_q, cu_k)
        return found

    def leaves(self) -> dict[str, torch.Tensor]:
        """Every tensor that takes a gradient, by the name of its gradient."""
        found = {"dq": self.q, "dk": self.k, "dv": self.v}
        if self.sink is not None:
            found["dsink"] = self.sink
        return found | {f"dcaptured{n}": t for n, t in enumerate(self.captured)}


def cumulative(lengths: list[int], device: torch.device | str) -> torch.Tensor:
    """int32 (len + 1,): 0 and the running sums."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", *, exact: bool = False, blank: bool = False
) -> Inputs:
    """Seeded tensors of a case; with `exact`, the values of a `dtype` problem held in float64; with `blank`, zeros."""
    device = torch.device(device)
    make = Maker(device, dtype, seed=sum(map(ord, case.name)), exact=exact, blank=blank)
    rows_q: tuple[int, ...]
    rows_k: tuple[int, ...]
    if case.packed is None:
        rows_q, rows_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    else:
        rows_q, rows_k = (sum(q for q, _ in case.packed),), (sum(k for _, k in case.packed),)
    q = make.draw(*rows_q, case.heads_q, case.head_dim)
    k = make.draw(*rows_k, case.heads_kv, case.head_dim)
    v = make.draw(*rows_k, case.heads_kv, case.head_dim_v)
    do = make.draw(*rows_q, case.heads_q, case.head_dim_v)
    lse_shape = (case.heads_q, *rows_q) if case.packed is not None else (case.batch, case.heads_q, case.seqlen_q)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = make.draw(*lse_shape, dtype=wide) if case.lse_gradient else None
    sink = make.draw(case.heads_q, dtype=wide).requires_grad_() if case.sink else None
    if case.memory == "expanded":
        k, v = (x[..., :1, :].expand_as(x).detach() for x in (k, v))
    if case.memory == "sliced":
        joint = torch.cat([q, k, v], -2)
        ends = (0, case.heads_q, case.heads_q + case.heads_kv, joint.shape[-2])
        q, k, v = (joint.narrow(-2, ends[n], ends[n + 1] - ends[n]).detach() for n in range(3))
    mask = None if case.mask is None else case.mask(case, make)
    score = None if case.score is None else case.score(case, make)
    for x in (q, k, v):
        x.requires_grad_()
    return Inputs(case, q, k, v, do, dlse, sink, mask, score, make.captured)


def untouched(count: int, dtype: torch.dtype) -> torch.Tensor:
    """(count,) zeros on the CPU that take no memory before they are written, however many there are."""
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)
