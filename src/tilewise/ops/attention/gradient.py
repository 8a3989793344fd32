"""The gradients of one call, and what every backward shares: delta, the sink, sums into captured tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tilewise.formula.expr import Expr
from tilewise.ops.attention.problem import Call


@dataclass
class Gradients:
    """Gradients by input; `captured` by slot of the score's tensors, None for those that need none."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None
    captured: list[torch.Tensor | None] = field(default_factory=list)

    @staticmethod
    def zeros(call: Call) -> Gradients:
        """Accumulators: dk and dv in the precision of the sums, dq in q's dtype (each row is written once)."""
        sums = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        return Gradients(
            torch.zeros_like(call.q),
            torch.zeros(call.k.shape, dtype=sums, device=call.k.device),
            torch.zeros(call.v.shape, dtype=sums, device=call.v.device),
            None,
            captured_buffers(call),
        )

    def rows(self, rows: slice | None, keys: slice | None) -> Gradients:
        """Views for one packed sequence as a batch of one."""
        if rows is None or keys is None:
            return self
        return Gradients(self.dq[None, rows], self.dk[None, keys], self.dv[None, keys], None, self.captured)

    def add_captured(self, load: Expr, value: torch.Tensor, index: list[torch.Tensor]) -> None:
        """Add `value` at `index` (integer tensors that broadcast to it) to the gradient of a captured tensor."""
        buffer = self.captured[load.value]
        assert buffer is not None
        flat = torch.zeros((), dtype=torch.int64, device=value.device)
        for part, stride in zip(index, buffer.stride(), strict=True):
            flat = flat + part.long() * stride
        flat = flat.reshape((1,) * (value.ndim - flat.ndim) + flat.shape)
        still = [dim for dim in range(value.ndim) if flat.shape[dim] == 1]
        value = value.sum(still, keepdim=True) if still else value
        buffer.view(-1).scatter_add_(0, flat.expand_as(value).reshape(-1), value.to(buffer.dtype).reshape(-1))

    def finish(self, call: Call, lse: torch.Tensor, delta: torch.Tensor) -> Gradients:
        """Round to the inputs' dtypes and add the sink's gradient."""
        self.dq, self.dk, self.dv = self.dq.to(call.q.dtype), self.dk.to(call.k.dtype), self.dv.to(call.v.dtype)
        self.dsink = sink_gradient(call, lse, delta)
        self.captured = rounded(call, self.captured)
        return self


def captured_buffers(call: Call) -> list[torch.Tensor | None]:
    """Zeroed contiguous accumulators for the captured tensors that need a gradient."""
    if call.score is None:
        return []
    sums = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    return [
        torch.zeros(t.shape, dtype=sums, device=t.device) if wanted else None
        for t, wanted in zip(call.score.tensors, call.grad_captured, strict=True)
    ]


def rounded(call: Call, captured: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The sums of `captured_buffers` in the dtypes of their tensors."""
    tensors = () if call.score is None else call.score.tensors
    return [None if g is None else g.to(t.dtype) for g, t in zip(captured, tensors, strict=True)]


def delta_of(o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, packed: bool) -> torch.Tensor:
    """rowsum(do * o) - dlse, in the layout of lse: what dP is centred by before it becomes dS."""
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    delta = (do.to(wide) * o.to(wide)).sum(-1)
    delta = delta.transpose(0, 1) if packed else delta.transpose(1, 2)
    return delta if dlse is None else delta - dlse


def sink_gradient(call: Call, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """d sink_h = -sum over rows of exp(sink_h - lse) * delta: the sink takes probability and gives no value."""
    if call.sink is None or not call.grad_sink:
        return None
    heads = 0 if call.packed else 1  # the heads dimension of lse
    shape = [-1 if dim == heads else 1 for dim in range(lse.ndim)]
    share = torch.exp(call.sink.detach().to(lse.dtype).view(shape) - lse)
    share = torch.where(lse == -torch.inf, 0.0, share)
    return -(share * delta).sum([dim for dim in range(lse.ndim) if dim != heads]).to(call.sink.dtype)
