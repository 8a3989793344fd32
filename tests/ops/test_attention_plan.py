"""Plans that several calls share: what holds on the CPU, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.quant import Encoded, encode
from tilewise.testing import serving
from tilewise.testing.case import Case
from tilewise.testing.cases import CPU_CASES
from tilewise.testing.properties import Setting

CASES = [case for case in CPU_CASES if case.memory == "dense" and not case.dropout and case.pairs <= 20_000]
LENGTHS = torch.tensor([40, 9], dtype=torch.int32)
LAYOUT = tw.Paged(torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32), LENGTHS)


def tensors(seed: int = 0, heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of two requests, and a pool of six pages of 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, heads, 8, generator=generator) for shape in ((2, 1), (6, 16), (6, 16)))
    return q, k[:, :, :2].contiguous(), v[:, :, :2].contiguous()


@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_run_is_a_call(case: Case, impl: str) -> None:
    """In every layout, by name and without."""
    for page_size in (None, 5) if case.packed or case.group > 1 else (None,):
        serving.a_run_is_a_call(Setting(impl), case, page_size, named=impl == "reference")
    if impl == "cpu_tiled":
        serving.a_run_is_a_call(Setting(impl), case, None)


def test_a_plan_names_its_implementation() -> None:
    plan = tw.plan(*tensors(), layout=LAYOUT)
    assert plan.impl == tw.why(*tensors(), layout=LAYOUT).chosen == "cpu_tiled"
    assert repr(plan).startswith("AttentionPlan(impl='cpu_tiled', q=torch.float32 (2, 1, 4, 8)")
    assert tw.plan(*tensors(), layout=LAYOUT, impl="reference").impl == "reference"


def test_lengths_and_pages_change_in_place() -> None:
    table, lengths = LAYOUT.block_table, LENGTHS.clone()
    assert isinstance(table, torch.Tensor)
    layout = tw.Paged(table.clone(), lengths)
    plan = tw.plan(*tensors(), layout=layout, mask=tw.causal)
    lengths.copy_(torch.tensor([3, 48]))
    layout.block_table.copy_(table.flip(0))  # type: ignore[union-attr]
    plan.update()
    assert torch.equal(plan.run(*tensors(1)), tw.attention(*tensors(1), layout=layout, mask=tw.causal))
    lengths[0] = 49
    with pytest.raises(InputError, match="seqlens_k: got 49 in request 0"):
        plan.update()
    with pytest.raises(InputError, match="seqlens_k: got 49 in request 0"):
        plan.run(*tensors(1))


def test_no_queries_and_no_keys() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    q, pool = torch.zeros(0, 3, 2, 8), torch.zeros(2, 4, 2, 8)
    plan = tw.plan(q, pool, pool, layout=tw.Paged(none.view(0, 1), none))
    plan.update()
    assert plan.run(q, pool, pool).shape == (0, 3, 2, 8)
    q, k = torch.ones(2, 1, 2, 8), torch.zeros(2, 0, 2, 8)
    o, lse = tw.plan(q, k, k).run_with_lse(q, k, k)
    assert o.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_a_plan_keeps_no_example() -> None:
    """The largest tensors of a step are not held until the next."""
    plan = tw.plan(*tensors(), layout=LAYOUT)
    kept = (plan._call.q, plan._call.k, plan._call.v)
    assert all(x.untyped_storage().nbytes() <= 8 for x in kept)


def test_compiled() -> None:
    """A plan from outside of the region, and one that it makes."""
    plan = tw.plan(*tensors(), layout=LAYOUT, mask=tw.causal)

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return plan.run(plan.run(q, k, v), k, v)

    def planned_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own = tw.plan(q, k, v, layout=LAYOUT, mask=tw.causal)
        own.update()
        return own.run(own.run(q, k, v), k, v)

    want = layers(*tensors())
    for function in (layers, planned_inside):
        assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors()), want)


Q, K, V = tensors()
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another batch": ({"q": Q[:1]}, r"q: got .*\(1, 1, 4, 8\).*; expected .*\(2, 1, 4, 8\).*, as planned"),
    "other heads": ({"k": K[:, :, :1]}, r"k: got .*\(6, 16, 1, 8\)"),
    "another type": ({"v": V.double()}, r"v: got torch.float64 .*; expected torch.float32"),
    "another device": ({"q": Q.to("meta")}, r"q: got .* on meta; expected .* on cpu, as planned"),
    "other strides": ({"k": K.transpose(1, 2).contiguous().transpose(1, 2)}, r"k: got .* strides \(256, 8, 128, 1\)"),
    "a list": ({"v": [V]}, r"v: got list"),
    "a sink": ({"sink": torch.zeros(4)}, r"sink: got torch.float32; expected none, as planned"),
    "a sink of other heads": ({"sink": torch.zeros(3)}, r"sink: got torch.float32 \(3,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    changes, message = WRONG[name]
    plan = tw.plan(Q, K, V, layout=LAYOUT)
    with pytest.raises(InputError, match=message):
        plan.run(**{"q": Q, "k": K, "v": V, **changes})


def test_refused_without_the_sink_that_was_planned() -> None:
    plan = tw.plan(Q, K, V, layout=LAYOUT, sink=torch.zeros(4))
    sink = torch.randn(4)
    assert torch.equal(plan.run(Q, K, V, sink=sink), tw.attention(Q, K, V, layout=LAYOUT, sink=sink))
    for wrong, got in ((None, "none"), (sink.half(), "torch.float16")):
        with pytest.raises(InputError, match=f"sink: got {got}; expected one of torch.float32, as planned"):
            plan.run(Q, K, V, sink=wrong)


def test_gradients_are_refused() -> None:
    q, slopes = Q.clone().requires_grad_(), torch.ones(4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="plan: got a tensor that takes a gradient"):
        tw.plan(q, K, V, layout=LAYOUT)
    plan = tw.plan(Q, K, V, layout=LAYOUT)
    with pytest.raises(UnsupportedError, match="not differentiable"):
        plan.run(q, K, V)
    with torch.no_grad():
        assert torch.equal(plan.run(q, K, V), plan.run(Q, K, V))
        scored = tw.plan(Q, K, V, layout=LAYOUT, score=tw.alibi(slopes))
    with pytest.raises(UnsupportedError, match="not differentiable"):
        scored.run(Q, K, V)
    sunk = tw.plan(Q, K, V, layout=LAYOUT, sink=torch.zeros(4))
    with pytest.raises(UnsupportedError, match="not differentiable"):
        sunk.run(Q, K, V, sink=torch.zeros(4, requires_grad=True))


def test_arguments_are_checked_as_those_of_a_call() -> None:
    with pytest.raises(InputError, match="impl: got 'nope'"):
        tw.plan(Q, K, V, layout=LAYOUT, impl="nope")
    with pytest.raises(InputError, match="scale: got nan"):
        tw.plan(Q, K, V, layout=LAYOUT, scale=float("nan"))
    with pytest.raises(UnsupportedError, match="impl='cpu_sdpa'"):
        tw.plan(Q, K, V, layout=LAYOUT, impl="cpu_sdpa")


def test_encoded_keys_and_values() -> None:
    pool = [encode(torch.randn(6, 4, 2, 16), "int8") for _ in range(2)]
    layout = tw.Paged(torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([9, 5], dtype=torch.int32))
    q = torch.randn(2, 1, 4, 16)
    plan = tw.plan(q, *pool, layout=layout, mask=tw.causal)
    assert torch.equal(plan.run(q, *pool), tw.attention(q, *pool, layout=layout, mask=tw.causal))
    with pytest.raises(InputError, match="an Encoded, as planned"):
        plan.run(q, *(torch.zeros(6, 4, 2, 16) for _ in range(2)))
    with pytest.raises(InputError, match=r"k\.scale"):
        plan.run(q, Encoded(pool[0].data, pool[0].scale.transpose(1, 2).contiguous().transpose(1, 2)), pool[1])
