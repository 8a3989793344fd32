"""The custom operators of merging (opcheck) and torch.compile: whole graphs, equal to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.ops.test_attention_compile import run_fresh
from tilewise.core.errors import InputError
from tilewise.testing.merging import BY_NAME, make_inputs

NAMES = ("pair", "three_packed", "stacked", "ragged", "float32_out")


def operator_arguments(name: str) -> tuple[Any, ...]:
    """Arguments of `tilewise::merge_forward` for a named case."""
    case = BY_NAME[name]
    inputs = make_inputs(case, torch.bfloat16 if case.out else torch.float32)
    form = "stacked" if case.stacked else "separate" if inputs.indptr is None else "ragged"
    return (inputs.o, inputs.lse, inputs.indptr, form, torch.float32, "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_the_forward_operator(name: str) -> None:
    torch.library.opcheck(torch.ops.tilewise.merge_forward.default, operator_arguments(name))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_the_backward_operator(name: str) -> None:
    o, lse, *rest = operator_arguments(name)
    arguments = ([x.detach() for x in o], [x.detach() for x in lse], *rest)
    merged, total = torch.ops.tilewise.merge_forward(*arguments)
    incoming = (torch.randn_like(merged), torch.randn_like(total))
    torch.library.opcheck(torch.ops.tilewise.merge_backward.default, (*incoming, *arguments))


PROGRAM = """
from tilewise.testing.merging import BY_NAME, make_inputs
half = {"pair": lambda o, lse, ends: tw.merge(*zip(o, lse)),
        "stacked": lambda o, lse, ends: tw.merge_states(o[0], lse[0], dtype=torch.float32),
        "ragged": lambda o, lse, ends: tw.merge_states(o[0], lse[0], indptr=ends)}
for backend in ("aot_eager", "inductor"):
    for name, fn in half.items():
        torch._dynamo.reset()
        inputs = make_inputs(BY_NAME[name], torch.float32)
        call = lambda o, lse: fn([2.0 * x for x in o], lse, inputs.indptr)
        found = []
        for run in (torch.compile(call, fullgraph=True, backend=backend), call):  # the compiled call comes first
            merged, total = run(inputs.o, inputs.lse)
            loss = merged.sin().sum() + total.masked_fill(total == -torch.inf, 0.0).square().sum()
            found.append((merged, total, *torch.autograd.grad(loss, (*inputs.o, *inputs.lse))))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
        if backend == "inductor":
            break
q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
part = lambda q, k, v, keys: tw.attention_with_lse(q, k[:, keys], v[:, keys])
two = lambda q, k, v: tw.merge(part(q, k, v, slice(0, 9)), part(q, k, v, slice(9, None)))
torch.testing.assert_close(torch.compile(two, fullgraph=True, backend="aot_eager", dynamic=True)(q, k, v), two(q, k, v))
"""


def test_compiles_whole_as_the_first_call_of_a_process() -> None:
    run_fresh(PROGRAM)


def test_indptr_is_checked_when_a_compiled_region_runs() -> None:
    o, lse = torch.randn(6, 3, 8), torch.randn(3, 6)
    merged = torch.compile(lambda indptr: tw.merge_states(o, lse, indptr=indptr), fullgraph=True, backend="aot_eager")
    assert merged(torch.tensor([0, 2, 6], dtype=torch.int32))[0].shape == (2, 3, 8)
    with pytest.raises(InputError, match="indptr: got first 0, last 5"):
        merged(torch.tensor([0, 2, 5], dtype=torch.int32))
