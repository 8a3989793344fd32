"""An operation as PyTorch sees it: an autograd function in eager mode, a custom operator inside torch.compile.

For operations whose call is a dataclass of tensors and plain values, with one function forward and one backward.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import NAMED, TRITON, Need, Row
from tilewise.core.tensors import batched, check_all_dense, no_derivative, plain, recorded, transformed
from tilewise.ops.derivatives import gradients as gradients_of
from tilewise.ops.derivatives import run_backward
from tilewise.ops.forward_mode import refuse_forward_mode

C = TypeVar("C")
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Operation(Generic[C]):
    """One operation: what its calls hold, and who runs them.

    `call` is a dataclass whose fields are tensors (or None), numbers, strings, dtypes and tuples of these.
    `results(call)` are empty tensors for what a forward fills, by name; the first `outputs` of them (a number, or a
    function of the call) go to the caller, the others only to the backward, which is given what `keeps` names of the
    call's tensors (others are None) and of the results, and of both if they have the name in common the result.
    `gradients(call, kept, wanted)` are empty tensors for the gradients of the fields `wanted`; `alike` names fields
    whose gradient is that of another one, which is then wanted in their place.

    A row's `forward(call, results)` fills the results; its `backward(call, kept, incoming, gradients)` the gradients,
    from those of the outputs. Where the first tensor of a call is empty, neither runs and all is 0.

    `composed(call)` gives the outputs by PyTorch's own operations: for second derivatives, vmap and forward mode, which
    are errors without it. The call that a backward sees must be enough for it, or `composed_backward(call, kept,
    incoming, wanted)` gives the gradients so.
    """

    name: str
    call: type[C]
    rows: tuple[Row[C], ...]
    results: Callable[[C], Tensors]
    gradients: Callable[[C, Tensors, Sequence[str]], Tensors]
    keeps: tuple[str, ...]
    outputs: int | Callable[[C], int] = 1
    alike: Mapping[str, str] = dataclasses.field(default_factory=dict)
    composed: Callable[[C], Sequence[torch.Tensor]] | None = None
    composed_backward: Callable[[C, Tensors, Sequence[torch.Tensor], Sequence[str]], Tensors] | None = None
    _operators: list[Any] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        forward = torch.library.custom_op(
            f"tilewise::{self.name}",
            self._compiled_forward,
            mutates_args=(),
            schema="(Tensor[] tensors, str how, str impl) -> Tensor[]",
        )
        backward = torch.library.custom_op(
            f"tilewise::{self.name}_backward",
            self._compiled_backward,
            mutates_args=(),
            schema="(Tensor[] kept, Tensor[] incoming, str how, str wanted, str impl) -> Tensor[]",
        )
        forward.register_fake(self._fake_forward)
        backward.register_fake(self._fake_backward)
        forward.register_autograd(self._autograd, setup_context=self._setup_context)
        refuse_forward_mode(self.name, forward, backward)
        self._operators.extend((forward, backward))

    def __call__(self, call: C, impl: str | None = None) -> tuple[torch.Tensor, ...]:
        """The outputs; raises InputError for an unknown `impl`, UnsupportedError where nothing runs this call."""
        by_field = fields_of(call)
        tensors = list(by_field.values())
        aside = not plain(tensors)
        if aside:
            check_all_dense(by_field)
        row = dispatch.choose(self.rows, self.name, call, impl)
        if aside and transformed(tensors):
            if self.composed is None:
                raise no_derivative(self.name)
            return tuple(self.composed(call))[: self.count(call)]
        if aside and recorded(tensors):
            return tuple(self._operators[0](tensors, _written(call), row.name)[: self.count(call)])
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            found: tuple[torch.Tensor, ...] = _Eager.apply(self, row, call, *tensors)  # type: ignore[no-untyped-call]
            return found
        return tuple(self.run_forward(row, call).values())[: self.count(call)]

    def count(self, call: C) -> int:
        """How many results go to the caller."""
        return self.outputs if isinstance(self.outputs, int) else self.outputs(call)

    # the work ------------------------------------------------------------------------------------------------------

    def run_forward(self, row: Row[C], call: C) -> Tensors:
        results = self.results(call)
        if _empty(call):
            return {name: x.zero_() for name, x in results.items()}
        row.function(row.forward)(call, results)
        return results

    def run_backward(
        self, row: Row[C], call: C, kept: Tensors, incoming: Sequence[torch.Tensor], wanted: Sequence[str]
    ) -> Tensors:
        assert row.backward is not None
        gradients = self.gradients(call, kept, wanted)
        if not any(x.numel() for x in incoming):
            return {name: x.zero_() for name, x in gradients.items()}
        row.function(row.backward)(call, kept, incoming, gradients)
        return gradients

    def differentiated(
        self, first: Callable[..., Sequence[torch.Tensor]], call: C, kept: Tensors, incoming: Sequence[torch.Tensor],
        wanted: Sequence[str],
    ) -> Tensors:  # fmt: skip
        """The gradients `wanted`, which `first(incoming, kept, wanted)` computes, differentiable once more."""
        if not torch.is_grad_enabled() and not batched(incoming):  # nobody asks for more
            incoming = [x.resolve_neg() for x in incoming]  # kernels read memory as it lies
            return dict(zip(wanted, first(incoming, list(kept.values()), wanted), strict=True))
        count, names = len(incoming), list(kept)

        def by_kernels(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            return first(tensors[:count], list(tensors[count:]), wanted)

        def by_operations(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            there = dict(zip(names, tensors[count:], strict=True))
            return list(self._by_operations(self.with_kept(call, there), there, tensors[:count], wanted).values())

        composed = None if self.composed is None and self.composed_backward is None else by_operations
        found = run_backward(self.name, by_kernels, composed, [*incoming, *kept.values()], count)
        return dict(zip(wanted, found, strict=True))  # type: ignore[arg-type]

    def _by_operations(
        self, call: C, kept: Tensors, incoming: Sequence[torch.Tensor], wanted: Sequence[str]
    ) -> Tensors:
        """Gradients by PyTorch's own operations."""
        if self.composed_backward is not None:
            return self.composed_backward(call, kept, incoming, wanted)
        assert self.composed is not None
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            views = {name: x.view_as(x) for name, x in fields_of(call).items() if name in wanted}
            outputs = self.composed(dataclasses.replace(call, **views))  # type: ignore[type-var]
            found = gradients_of(outputs, [views[name] for name in wanted], incoming, create_graph)
        return dict(zip(wanted, found, strict=True))  # type: ignore[arg-type]

    def kept(self, call: C, results: Tensors) -> Tensors:
        """What the backward is given, by name."""
        there = {**fields_of(call), **results}
        return {name: there[name] for name in self.keeps if name in there}

    def sources(self, fields: Iterable[str]) -> list[str]:
        """The fields whose gradients these fields take, each once."""
        return list(dict.fromkeys(self.alike.get(name, name) for name in fields))

    def without(self, call: C, kept: Tensors) -> C:
        """The call as the backward sees it."""
        changes: dict[str, Any] = {name: kept.get(name) for name in fields_of(call)}
        return dataclasses.replace(call, **changes)  # type: ignore[type-var]

    def with_kept(self, call: C, kept: Tensors) -> C:
        """The call with the tensors among its fields that were kept."""
        fields = {field.name for field in dataclasses.fields(self.call)}  # type: ignore[arg-type]
        return dataclasses.replace(call, **{name: x for name, x in kept.items() if name in fields})  # type: ignore[type-var]

    # as custom operators -------------------------------------------------------------------------------------------

    def _row(self, impl: str) -> Row[C]:
        return dispatch.named(self.rows, impl)

    def _compiled_forward(self, tensors: list[torch.Tensor], how: str, impl: str) -> list[torch.Tensor]:
        return list(self.run_forward(self._row(impl), self._read(tensors, how)).values())

    def _fake_forward(self, tensors: list[torch.Tensor], how: str, impl: str) -> list[torch.Tensor]:
        return list(self.results(self._read(tensors, how)).values())

    def _compiled_backward(
        self, kept: list[torch.Tensor], incoming: list[torch.Tensor], how: str, wanted: str, impl: str
    ) -> list[torch.Tensor]:
        call, names = self._kept_call(kept, how)
        return list(self.run_backward(self._row(impl), call, names, incoming, wanted.split()).values())

    def _fake_backward(
        self, kept: list[torch.Tensor], incoming: list[torch.Tensor], how: str, wanted: str, impl: str
    ) -> list[torch.Tensor]:
        return list(self.gradients(*self._kept_call(kept, how), wanted.split()).values())

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        tensors, ctx.how, ctx.impl = inputs
        call = self._read(tensors, ctx.how)
        results = dict(zip(self.results(call), output, strict=True))
        ctx.wanted = self.sources(name for name, x in fields_of(call).items() if x.requires_grad)
        ctx.names, ctx.count = list(fields_of(call)), self.count(call)
        ctx.save_for_backward(*self.kept(call, results).values())

    def _autograd(self, ctx: Any, incoming: list[torch.Tensor]) -> tuple[Any, ...]:
        def first(
            incoming: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], wanted: Sequence[str]
        ) -> Sequence[torch.Tensor]:
            found: list[torch.Tensor] = self._operators[1](
                list(kept), list(incoming), ctx.how, " ".join(wanted), ctx.impl
            )
            return found

        call, kept = self._kept_call(ctx.saved_tensors, ctx.how)
        by_name = self.differentiated(first, call, kept, incoming[: ctx.count], ctx.wanted)
        return [by_name.get(self.alike.get(name, name)) for name in ctx.names], None, None

    def _read(self, tensors: Sequence[torch.Tensor], how: str) -> C:
        """The call that `_written` wrote, with these tensors."""
        names, values = ast.literal_eval(how)
        return self._made(dict(zip(names, tensors, strict=True)), values)

    def _kept_call(self, kept: Sequence[torch.Tensor], how: str) -> tuple[C, Tensors]:
        """The call as the backward sees it, and what it was given, by name."""
        names, values = ast.literal_eval(how)
        fields = {field.name for field in dataclasses.fields(self.call)}  # type: ignore[arg-type]
        there = [name for name in self.keeps if name in names or name not in fields]
        by_name = dict(zip(there, kept, strict=True))
        return self._made({name: x for name, x in by_name.items() if name in fields}, values), by_name

    def _made(self, tensors: Tensors, values: dict[str, Any]) -> C:
        known: dict[str, Any] = {field.name: None for field in dataclasses.fields(self.call)}  # type: ignore[arg-type]
        known |= {name: _value(x) for name, x in values.items()}
        return self.call(**(known | tensors))


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operation: Operation[Any], row: Row[Any], call: Any, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = operation.run_forward(row, call)
        kept = operation.kept(call, results)
        ctx.save_for_backward(*kept.values())
        ctx.operation, ctx.row, ctx.names, ctx.kept = operation, row, list(fields_of(call)), list(kept)
        ctx.call = operation.without(call, {})
        # the outputs alone: for whatever is returned here, autograd makes a gradient of zeros
        return tuple(results.values())[: operation.count(call)]

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[Any, ...]:
        operation: Operation[Any] = ctx.operation
        kept = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        needed = zip(ctx.names, ctx.needs_input_grad[3:], strict=True)
        wanted = operation.sources(name for name, yes in needed if yes)

        def first(
            incoming: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], wanted: Sequence[str]
        ) -> Sequence[torch.Tensor]:
            there = dict(zip(ctx.kept, kept, strict=True))
            call = operation.with_kept(ctx.call, there)
            return list(operation.run_backward(ctx.row, call, there, incoming, wanted).values())

        found = operation.differentiated(first, ctx.call, kept, incoming, wanted)
        return None, None, None, *(found.get(operation.alike.get(name, name)) for name in ctx.names)


# calls ---------------------------------------------------------------------------------------------------------------


def fields_of(call: Any) -> Tensors:
    """Its tensors by field, in the order of the fields."""
    found = [(name, getattr(call, name)) for name in call.__dataclass_fields__]  # `dataclasses.fields` takes longer
    return {name: value for name, value in found if isinstance(value, torch.Tensor)}


def _empty(call: Any) -> bool:
    values = (getattr(call, name) for name in call.__dataclass_fields__)
    return next(x for x in values if isinstance(x, torch.Tensor)).numel() == 0


def _written(call: Any) -> str:
    """Names of the tensors that are there, and all else of a call, as `ast.literal_eval` reads it.

    Numbers that torch.compile takes as symbols become what they are now.
    """
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # sympy: only where a call is traced

    names, values = [], []
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if isinstance(value, torch.Tensor):
            names.append(field.name)
        elif value is not None:
            if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
                value = guard_scalar(value)
            text = repr(str(value)) if isinstance(value, torch.dtype) else repr(value)
            values.append(f"{field.name!r}: {text}")
    return f"({names!r}, {{{', '.join(values)}}})"


def _value(written: Any) -> Any:
    """A dtype where its name was written."""
    if isinstance(written, str) and written.startswith("torch."):
        return getattr(torch, written.removeprefix("torch."))
    return written


# rows ----------------------------------------------------------------------------------------------------------------


def rows_of(
    folder: str,
    kernels: str,
    device_of: Callable[[Any], torch.device],
    dtype_of: Callable[[Any], torch.dtype],
    cpu: str,
    triton: str,
    needs: tuple[Need[Any], ...] = (),
    reference: str = "float64, row by row: the specification",
) -> tuple[Row[Any], ...]:
    """The rows of an operation with `cpu`, `reference` and one module of Triton kernels in its folder: what `cpu`,
    `triton` and `reference` do in a sentence each, and what else the kernels need.
    """
    floats = dispatch.dtypes(dtype_of, torch.float16, torch.bfloat16, torch.float32)
    on_gpu: tuple[Need[Any], ...] = (TRITON, dispatch.gpu(device_of), floats, *needs)
    return (
        Row("cpu", f"{folder}.cpu", (dispatch.on("cpu", device_of),), cpu, backward="backward"),
        Row("triton", f"{folder}.{kernels}", on_gpu, triton, backward="backward"),
        Row(
            "reference",
            f"{folder}.reference",
            (),
            reference,
            prefers=(NAMED,),
            backward="backward",
        ),
    )
