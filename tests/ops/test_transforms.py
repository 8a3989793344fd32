"""Every differentiable operation under PyTorch's transforms and tracers: the numbers of its formula in float64, or an
error by name. No derivative is left out without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tilewise as tw
from tests.ops.transforms import CASES, Case
from tilewise.core.errors import InputError, UnsupportedError

ALL = pytest.mark.parametrize("name", CASES)


def close(found: Any, expected: Any, scale: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=scale, atol=scale)


def leaves(case: Case) -> tuple[torch.Tensor, ...]:
    return tuple(x.requires_grad_() for x in case.inputs())


def weights(like: torch.Tensor) -> torch.Tensor:
    """What an output is multiplied by."""
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).view(like.shape)


def first(o: torch.Tensor, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(o, x, weights(o), allow_unused=True, materialize_grads=True)


@ALL
def test_first_derivatives(name: str) -> None:
    case = CASES[name]
    found, expected = [], []
    for function, into in ((case.run, found), (case.plain, expected)):
        x = leaves(case)
        o = function(*x)
        into += [o, *first(o, x)]
    close(found, expected)


@ALL
@pytest.mark.parametrize("through", ["inputs", "incoming", "both"])
def test_second_derivatives_through_inputs_and_through_what_comes_in(name: str, through: str) -> None:
    case = CASES[name]

    def second(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = leaves(case)
        o = function(*x)
        w = weights(o).requires_grad_(through != "inputs")
        first = torch.autograd.grad((o * w).sum(), x, create_graph=True)
        wanted = {"inputs": x, "incoming": (w,), "both": (*x, w)}[through]
        loss = sum(g.pow(3).sum() for g in first) + 0.0 * sum(a.sum() for a in x)  # of rope there is no graph to x
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))

    close(second(case.run), second(case.plain))


@ALL
def test_second_derivatives_where_inputs_depend_on_each_other(name: str) -> None:
    case = CASES[name]

    def second(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        x = [x * scale for x in case.inputs()]
        x = [a + 0.1 * x[0].sum() for a in x]  # each is made of the first
        (first,) = torch.autograd.grad(function(*x).pow(2).sum(), scale, create_graph=True)
        return torch.autograd.grad(first, scale)[0]

    close(second(case.run), second(case.plain))


@pytest.mark.parametrize("name", ["attention_captured", "rms_norm", "softmax", "merge", "rope", "swiglu"])
def test_third_derivatives(name: str) -> None:
    case = CASES[name]

    def third(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = leaves(case)
        found = function(*x).pow(2).sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(found, x[0], create_graph=True)
            found = found.pow(3).sum()
        return found

    close(third(case.run), third(case.plain), 1e-7)


@ALL
def test_forward_mode(name: str) -> None:
    case, x = CASES[name], CASES[name].inputs()
    for n in range(len(x)):
        tangents = tuple(torch.full_like(a, 0.5) if m == n else torch.zeros_like(a) for m, a in enumerate(x))
        close(torch.func.jvp(case.run, x, tangents), torch.func.jvp(case.plain, x, tangents))


@ALL
def test_dual_tensors(name: str) -> None:
    case, x = CASES[name], CASES[name].inputs()

    def tangent(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        with forward_ad.dual_level():
            given = (*x[:-1], forward_ad.make_dual(x[-1], torch.ones_like(x[-1])))
            return forward_ad.unpack_dual(function(*given)).tangent

    close(tangent(case.run), tangent(case.plain))


@ALL
def test_vmap(name: str) -> None:
    case = CASES[name]
    batched = tuple(torch.stack([x, x.flip(0), 0.5 * x]) for x in case.inputs())
    close(torch.vmap(case.run)(*batched), torch.stack([case.plain(*(x[n] for x in batched)) for n in range(3)]))
    x = case.inputs()
    axes = (0, *[None] * (len(x) - 1))
    close(torch.vmap(case.run, axes)(batched[0], *x[1:]), torch.vmap(case.plain, axes)(batched[0], *x[1:]))


@ALL
def test_batched_gradients(name: str) -> None:
    case = CASES[name]
    found = []
    for function in (case.run, case.plain):
        x = leaves(case)
        o = function(*x)
        many = torch.stack([weights(o), weights(o).square()])
        found.append(torch.autograd.grad(o, x, many, is_grads_batched=True, allow_unused=True, materialize_grads=True))
    close(*found)


JACOBIANS = ("attention_captured", "attention_sink", "merge", "rms_norm", "softmax", "swiglu", "cross_entropy", "rope")
OF_FUNC = [
    *((name, transform) for name in CASES for transform in ("grad", "vmap of grad")),
    *((name, transform) for name in JACOBIANS for transform in ("jacrev", "jacfwd", "hessian")),
]


@pytest.mark.parametrize(("name", "transform"), OF_FUNC)
def test_transforms_of_torch_func(name: str, transform: str) -> None:
    case, x = CASES[name], CASES[name].inputs()

    def transformed(function: Callable[..., torch.Tensor]) -> Any:
        def loss(*x: torch.Tensor) -> torch.Tensor:
            return function(*x).pow(2).sum()

        if transform == "vmap of grad":
            return torch.vmap(torch.func.grad(loss))(*(torch.stack([a, -a]) for a in x))
        return getattr(torch.func, transform)(loss)(*x)

    close(transformed(case.run), transformed(case.plain))


@ALL
@pytest.mark.parametrize("kept", ["bmm", "everything"])
def test_selective_checkpointing(name: str, kept: str) -> None:
    case = CASES[name]
    policy: Any = [torch.ops.aten.bmm.default, torch.ops.aten.mm.default]
    if kept == "everything":
        policy = lambda *_, **__: torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE  # noqa: E731
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x = leaves(case)
    o = checkpoint(case.run, *x, use_reentrant=False, context_fn=contexts)
    close(first(o, x), first(case.plain(*x), x))


@ALL
def test_hooks_of_saved_tensors_may_give_other_strides(name: str) -> None:
    case, x = CASES[name], leaves(CASES[name])
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda a: a.clone(), lambda a: a.clone(memory_format=torch.contiguous_format)
    )
    with hooks:
        o = case.run(*x)
    close(first(o, x), first(case.plain(*x), x))


class Module(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.inputs = torch.nn.ParameterList(case.inputs())

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return self.case.run(*(x * scale for x in self.inputs))


@ALL
def test_functional_call(name: str) -> None:
    case, x = CASES[name], leaves(CASES[name])
    module = Module(case)
    given = {f"inputs.{n}": a * 2.0 for n, a in enumerate(x)}
    one = torch.ones((), dtype=torch.float64)
    o = torch.func.functional_call(module, given, one)
    expected = case.plain(*(2.0 * a for a in x))
    close([o, *first(o, x)], [expected, *first(expected, x)])


@ALL
def test_export(name: str) -> None:
    case = CASES[name]
    module, one = Module(case), torch.ones((), dtype=torch.float64)
    program = torch.export.export(module, (one,))
    assert any("tilewise" in str(node.target) for node in program.graph.nodes)
    close(program.module()(one), case.plain(*case.inputs()))


# tracing -------------------------------------------------------------------------------------------------------------


def gradient_of(case: Case) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = tuple(a.detach().requires_grad_() for a in x)
        o = case.run(*x)
        return (o, *torch.autograd.grad(o, x, torch.ones_like(o), allow_unused=True, materialize_grads=True))

    return run


@ALL
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_keeps_operators(name: str, mode: str) -> None:
    case = CASES[name]
    if (mode != "real" and name in ("attention_packed", "rope", "rope_qkv", "merge_states_ragged", "softmax")) or (
        mode != "real" and "cross_entropy" in name
    ):
        mode_of = functools.partial(make_fx, tracing_mode=mode, _allow_non_fake_inputs=True)  # constants beside
    else:
        mode_of = functools.partial(make_fx, tracing_mode=mode)
    traced = mode_of(gradient_of(case))(*case.inputs())
    assert any("tilewise" in str(node.target) for node in traced.graph.nodes)
    others = tuple(0.5 * x for x in case.inputs())
    plain = Case(case.shapes, case.plain, case.plain)
    close(traced(*others), gradient_of(plain)(*others))


def shapes_of(found: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.stride(), x.dtype) for x in found]


@ALL
def test_meta_tensors_have_the_shapes(name: str) -> None:
    case = CASES[name]
    found = gradient_of(case)(*(x.to("meta") for x in case.inputs()))
    assert all(x.is_meta for x in found)
    assert shapes_of(found) == shapes_of(gradient_of(case)(*case.inputs()))


@ALL
def test_fake_tensors_have_the_shapes(name: str) -> None:
    case = CASES[name]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [mode.from_tensor(x) for x in case.inputs()]
        found = gradient_of(case)(*inputs)
    assert shapes_of(found) == shapes_of(gradient_of(case)(*case.inputs()))
    outside = gradient_of(case)(*inputs)  # fake tensors may leave their mode
    assert shapes_of(outside) == shapes_of(found)


# compiled ------------------------------------------------------------------------------------------------------------

SOME = pytest.mark.parametrize("name", ["attention_captured", "attention_sink", "merge", "rms_norm", "rope"])


@SOME
def test_forward_mode_inside_a_compiled_region(name: str) -> None:
    torch._dynamo.reset()
    case, x = CASES[name], CASES[name].inputs()
    tangents = tuple(torch.ones_like(a) for a in x)

    def run(*x: torch.Tensor) -> Any:
        return torch.func.jvp(case.run, x, tangents)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    close(compiled(*x), torch.func.jvp(case.plain, x, tangents))


@SOME
@pytest.mark.parametrize("how", ["jvp", "dual"])
def test_forward_mode_of_a_compiled_region_is_right_or_refused_by_name(name: str, how: str) -> None:
    torch._dynamo.reset()
    case, x = CASES[name], CASES[name].inputs()
    compiled = torch.compile(case.run, backend="aot_eager", fullgraph=how == "dual")  # PyTorch: jvp is not traced so
    compiled(*x)  # which knows of no tangents
    tangents = tuple(torch.ones_like(a) for a in x)
    expected = torch.func.jvp(case.plain, x, tangents)
    if how == "jvp":
        close(torch.func.jvp(compiled, x, tangents), expected)
        return
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="tangent of forward mode"):
        compiled(*(forward_ad.make_dual(a, t) for a, t in zip(x, tangents, strict=True)))


# what refuses --------------------------------------------------------------------------------------------------------

K = torch.randn(6, 2, 16)
POOL = torch.zeros(3, 4, 2, 16)
SLOTS = torch.arange(6)


def _written(k: torch.Tensor) -> None:
    pages = POOL.clone()
    tw.kv_write(k, K, pages, pages.clone(), SLOTS)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "kv_write": (_written, K),
    "copy_pages": (lambda pages: tw.copy_pages(pages, pages.clone(), torch.tensor([[0, 1]])), POOL),
    "quantize_qkv": (lambda q: tw.quantize_qkv(q, K[None], K[None], scheme=tw.Sage2()).q, K[None]),
    "attention quantize": (lambda q: tw.attention(q, K[None], K[None], quantize=tw.Sage2()), K[None]),
    "select_tiles": (lambda q: tw.select_tiles(q, K[None], tw.TopK(0.5)).chosen, K[None]),
    "attention select": (lambda q: tw.attention(q, K[None], K[None], select=tw.TopK(0.5)), K[None]),
    "norm quantize": (lambda x: tw.rms_norm(x, quantize="int8")[0], K),
    "rope inplace": (lambda q: tw.rope(q, rope=tw.Rope(*tw.rope_tables(16, 8), SLOTS), inplace=True), K),
    "summarize_pages": (
        lambda pages: tw.summarize_pages(
            pages,
            POOL,
            tw.PageSummaries.of(POOL, POOL),
            tw.Paged(torch.tensor([[0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)),
        ),
        POOL,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad"])
def test_what_has_no_formula_refuses_transforms_by_name(name: str, transform: str) -> None:
    run, x = REFUSED[name]
    transformed = {
        "vmap": lambda: torch.vmap(run)(torch.stack([x, x])),
        "jvp": lambda: torch.func.jvp(run, (x.clone(),), (torch.ones_like(x),)),
        "grad": lambda: torch.func.grad(lambda a: run(a).sum())(x.clone()),
    }[transform]
    with pytest.raises((UnsupportedError, InputError), match=r"transform|gradient|plain tensors"):
        transformed()


def test_second_derivatives_of_few_bits_raise() -> None:
    q = torch.randn(1, 64, 2, 16, requires_grad=True)
    loss = tw.attention(q, q, q, quantize=tw.Sage2()).pow(2).sum()
    (first,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(first.sum(), q)


@pytest.mark.parametrize("through", ["inputs", "incoming"])
def test_second_derivatives_of_too_many_scores_raise(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.ops.attention.composed.MOST_SCORES", 100)
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    w = torch.ones(8, requires_grad=True)
    (first,) = torch.autograd.grad((tw.attention(q, q, q) * w).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"attention: got 3,200 scores .* at most 100"):
        torch.autograd.grad(first.pow(2).sum(), q if through == "inputs" else w)
    with pytest.raises(UnsupportedError, match="3,200 scores"):
        torch.func.jvp(lambda a: tw.attention(a, a, a), (q.detach(),), (torch.ones_like(q),))


@pytest.mark.parametrize("far", ["drop", "summary"])
def test_second_derivatives_of_selected_tiles(far: str) -> None:
    """Those of what is computed, with one key for each of the other tiles."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 24, 1, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    select = tw.Select(tw.TopK(0.5), block=(8, 8), far=far)
    chosen = tw.select_tiles(q, k, select)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, select=chosen)

    assert torch.autograd.gradgradcheck(loss, (q, k, v), fast_mode=True)
