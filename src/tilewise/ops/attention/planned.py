"""Attention that is planned once and run for every layer of a model: calls that differ in their tensors alone (Ye et
al., "FlashInfer").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from tilewise.core.dispatch import Row
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.core.readback import being_traced
from tilewise.core.tensors import check_all_dense, plain, refuse_transforms
from tilewise.layouts import Packed, Paged, index_tensors
from tilewise.ops.attention.arguments import check_sink
from tilewise.ops.attention.problem import Call, check_values, codes_and_scales
from tilewise.ops.attention.torch_op import compiled, is_empty, run_forward
from tilewise.quant import ByChannel, Encoded


class _Prepared(Protocol):
    """What an implementation keeps for calls of one kind."""

    def update(self, call: Call) -> None: ...

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]: ...


class _Example(NamedTuple):
    """What runs must have in common with a tensor that a plan was made for."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # whether it starts at a multiple of 16 bytes

    @staticmethod
    def of(x: torch.Tensor) -> _Example:
        return _Example(x.shape, x.stride(), x.dtype, x.device, not being_traced() and x.data_ptr() % 16 == 0)

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)} with strides {self.strides} on {self.device}"


class AttentionPlan:
    """Attention for tensors of one kind, with mask, score, scale and layout fixed: what `tilewise.plan` returns.

    Runs read the pages and lengths that the layout's tensors hold at that time. After lengths have changed, or pages of
    shared prefixes, call `update`. Runs and updates of one plan share its memory: they belong on one stream, one after
    another. Any number of runs may follow a plan or an update, also in a CUDA graph that is replayed.

    Attributes:
        impl: the implementation that runs, as `tilewise.why` names it.

    Source: Ye et al., "FlashInfer", 2025.

    Example:
        >>> planned = tw.plan(q, k, v, mask=tw.causal)
        >>> planned.run(q, k, v).shape
        torch.Size([2, 100, 4, 16])
    """

    def __init__(self, call: Call, row: Row[Call]) -> None:
        self.impl = row.name
        self._row = row
        self._examples = [_Example.of(x) for x in (call.q, call.k, call.v, *(call.scales or ()))]
        self._prepared: _Prepared | None = None
        if row.plan is not None and not is_empty(call) and not being_traced():
            self._prepared = row.function(row.plan)(call)
        # of the examples, only what takes no memory is kept
        q, k, v, *scales = (x.new_empty(()).expand(x.shape) for x in (call.q, call.k, call.v, *(call.scales or ())))
        self._call = replace(call, q=q, k=k, v=v, scales=tuple(scales) or None)

    def __repr__(self) -> str:
        return f"AttentionPlan(impl={self.impl!r}, q={self._examples[0]})"

    def __reduce__(self) -> Any:
        hint = "call tilewise.plan where it runs"
        raise UnsupportedError("AttentionPlan", got="a pickle or a copy of it", expected="the plan itself", hint=hint)

    def update(self) -> None:
        """Plan for what the layout's tensors hold now. On a GPU it is one small kernel, or two, and nothing waits.

        Raises:
            InputError: lengths or pages do not fit, where they are read on the host (on a CPU).
        """
        if not being_traced():
            check_values(self._call)
        if self._prepared is not None:
            self._prepared.update(self._call)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | Encoded | ByChannel,
        v: torch.Tensor | Encoded,
        *,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of these tensors, as `attention` gives it for the plan's mask, score, scale and layout.

        Args:
            q, k, v: of the shapes, strides, dtypes and device of those that were planned for.
            sink: logits (num_heads_q,), given if and only if the plan was made with some.

        Returns:
            o, in a tensor of its own: (batch, seqlen_q, num_heads_q, head_dim_v), packed (total_q, num_heads_q,
            head_dim_v).

        Raises:
            InputError: a tensor is not like the one that was planned for.
            UnsupportedError: a tensor requires a gradient.
        """
        return self.run_with_lse(q, k, v, sink=sink)[0]

    def run_with_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor | Encoded | ByChannel,
        v: torch.Tensor | Encoded,
        *,
        sink: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `run`, with the log-sum-exp of each query's scores.

        Args:
            q, k, v, sink: as `run` takes them.

        Returns:
            (o, lse). lse: float32 (float64 for float64 input), natural logarithm, (batch, num_heads_q, seqlen_q),
            packed (num_heads_q, total_q).

        Raises:
            InputError: a tensor is not like the one that was planned for.
            UnsupportedError: a tensor requires a gradient.
        """
        traced = being_traced()
        k, v, scales = _parts(k, v, self._call)
        tensors = (q, k, v, *(scales or ()))
        for name, x, example in zip(_NAMES, tensors, self._examples, strict=False):
            _check_like(name, x, example, self._prepared is not None and not traced and q.is_cuda)
        _check_sink_like(sink, self._call.sink, q)
        captured = () if self._call.score is None else self._call.score.tensors
        refuse_gradients(torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *captured)), sink)
        if not traced and not plain(tensors):
            check_all_dense(dict(zip(_NAMES, tensors, strict=False)))
            refuse_transforms("AttentionPlan", tensors)
        call = replace(self._call, q=q, k=k, v=v, sink=sink, scales=scales)
        if traced:
            return compiled(self._row, call)
        if self._prepared is not None:
            return self._prepared.run(call)
        check_values(call)
        return run_forward(self._row, call)


_NAMES = ("q", "k", "v", "k.scale", "v.scale", "k.least", "k.open", "k.place")


def _parts(k: Any, v: Any, planned: Call) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """k and v, or their codes and scales; raises InputError where they are not as the plan's were."""
    of_values = torch.Tensor if planned.scales is None else Encoded
    for name, x, wanted in (("k", k, ByChannel if planned.keys_by_channel else of_values), ("v", v, of_values)):
        if isinstance(x, (Encoded, ByChannel)) if wanted is torch.Tensor else not isinstance(x, wanted):
            expected = f"{_A[wanted]}, as planned"
            raise InputError(name, got=type(x).__name__, expected=expected, hint="plan with such keys and values")
    return (k, v, None) if planned.scales is None else codes_and_scales(k, v)


_A = {torch.Tensor: "a tensor", Encoded: "an Encoded", ByChannel: "a ByChannel"}


def check_kept(layout: Packed | Paged) -> None:
    """Raise InputError for index tensors in int64: runs read the layout's own tensors, not what they were."""
    if any(isinstance(x, torch.Tensor) and x.dtype is torch.int64 for x in index_tensors(layout)):
        hint = "convert them once, .to(torch.int32), and change those in place: runs and updates read them again"
        raise InputError("layout", got="index tensors in int64", expected="int32 for a plan", hint=hint)


def refuse_gradients(wanted: bool, sink: torch.Tensor | None = None) -> None:
    """Raise UnsupportedError where a gradient is wanted."""
    if wanted or (sink is not None and torch.is_grad_enabled() and sink.requires_grad):
        raise UnsupportedError(
            "plan",
            got="a tensor that takes a gradient",
            expected="none: plans are not differentiable",
            hint="run under torch.no_grad(), or call tilewise.attention",
        )


def _check_like(name: str, x: torch.Tensor, example: _Example, by_pointer: bool) -> None:
    if not isinstance(x, torch.Tensor):
        raise InputError(name, got=type(x).__name__, expected=f"{example}, as planned", hint="pass a tensor")
    same = x.shape == example.shape and x.dtype == example.dtype and x.device == example.device
    if not same or x.stride() != example.strides:
        raise InputError(
            name, got=str(_Example.of(x)), expected=f"{example}, as planned", hint="plan with such tensors"
        )
    if by_pointer and example.aligned and x.data_ptr() % 16:
        raise InputError(
            name,
            got="a data_ptr() that is not a multiple of 16 bytes",
            expected="a multiple of 16, as the planned tensor had",
            hint="plan with such tensors, or clone this one",
        )


def _check_sink_like(sink: torch.Tensor | None, planned: torch.Tensor | None, q: torch.Tensor) -> None:
    if sink is not None:
        check_sink(sink, q)
    if (None if sink is None else sink.dtype) != (None if planned is None else planned.dtype):
        raise InputError(
            "sink",
            got="none" if sink is None else sink.dtype,
            expected="none, as planned" if planned is None else f"one of {planned.dtype}, as planned",
            hint="plan with the sink of any layer: it is an example, as q, k and v are",
        )
