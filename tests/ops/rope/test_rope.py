"""`rope` on a CPU: against PyTorch in float64, the bits of `kv_write`, in place, errors, operators, properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core import dispatch
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.rope import cpu
from tilewise.testing import operators
from tilewise.testing import rope as cases
from tilewise.testing.rope import BY_NAME, CASES, TurnCase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIDE_BY_SIDE = [case for case in CASES if case.heads_k]


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(case: TurnCase, impl: str, dtype: torch.dtype) -> None:
    cases.check(case, dtype, impl)


@pytest.mark.parametrize("case", SIDE_BY_SIDE, ids=repr)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_side_by_side(case: TurnCase, impl: str, dtype: torch.dtype) -> None:
    cases.check_joint(case, dtype, impl)


@given(
    lead=st.one_of(st.tuples(st.integers(0, 20)), st.tuples(st.integers(0, 4), st.integers(0, 6))),
    heads=st.tuples(st.integers(1, 6), st.integers(0, 6)),
    pairs=st.integers(1, 40),
    rest=st.integers(0, 9),
    interleaved=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    table=st.sampled_from(DTYPES),
    memory=st.sampled_from(["", "joint", "HND", "strided"]),
)
def test_any_shape(lead, heads, pairs, rest, interleaved, dtype, table, memory) -> None:
    case = TurnCase("any", lead, *heads, 2 * pairs + rest, 2 * pairs, interleaved, table, memory)
    cases.check(case, dtype, "cpu")
    if case.heads_k:
        cases.check_joint(case, dtype, "cpu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_bits_are_those_of_written_keys(interleaved: bool, dtype: torch.dtype) -> None:
    case = TurnCase("keys", (12,), 3, 3, 20, 16, interleaved)
    inputs = cases.make_inputs(case, dtype)
    k, v = inputs["k"].detach(), torch.zeros(12, 3, 4, dtype=dtype)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"], interleaved)
    k_pages, v_pages = torch.zeros(3, 4, 3, 20, dtype=dtype), torch.zeros(3, 4, 3, 4, dtype=dtype)
    tw.kv_write(k, v, k_pages, v_pages, torch.arange(12), rope=rope)
    assert torch.equal(tw.rope(k, rope=rope), k_pages.flatten(0, 1))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_nan_stays_in_its_row(impl: str) -> None:
    case = TurnCase("nan", heads_k=0)
    operators.poisoned(cases.ours(case, impl), cases.make_inputs(case, torch.float32), "q", 2)


def test_gradients_are_turned_back() -> None:
    case = BY_NAME["part"]
    inputs = cases.make_inputs(case, torch.float64)
    call = cases.ours(case, "cpu")
    turned = call(**inputs)
    found = torch.autograd.grad(turned, [inputs["q"], inputs["k"]], [x.detach() for x in turned])
    torch.testing.assert_close(list(found), [inputs["q"].detach(), inputs["k"].detach()])


@pytest.mark.parametrize("name", ["batch", "part_of_neighbours", "q_alone"])
def test_gradcheck(name: str) -> None:
    case = BY_NAME[name]
    inputs = cases.make_inputs(case, torch.float64)
    leaves = {name: x for name, x in inputs.items() if name in ("q", "k")}
    angles = {name: inputs[name] for name in ("cos", "sin", "positions")}
    call = cases.ours(case, "cpu")
    assert torch.autograd.gradcheck(lambda *x: call(**dict(zip(leaves, x, strict=True)), **angles), (*leaves.values(),))


@pytest.mark.parametrize("name", ["batch", "part_of_neighbours"])
def test_gradcheck_side_by_side(name: str) -> None:
    inputs = cases.joint_inputs(BY_NAME[name], torch.float64)
    qkv = inputs.pop("qkv")
    assert torch.autograd.gradcheck(lambda x: cases.joint(BY_NAME[name], "cpu")(x, **inputs), (qkv,))


def test_gradients_side_by_side_are_one_tensor_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward fills is what the caller gets; values that nobody uses give zeros."""
    filled: list[int] = []

    def watched(call: Any, kept: Any, incoming: Any, gradients: Any) -> None:
        filled.extend(x.data_ptr() for x in gradients.values())
        cpu.backward(call, kept, incoming, gradients)

    inputs = cases.joint_inputs(BY_NAME["batch"], torch.float32)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    outputs = tw.rope_qkv(inputs["qkv"], 4, 2, rope=rope)
    monkeypatch.setattr(dispatch, "_function", lambda module, name: watched)
    (found,) = torch.autograd.grad(outputs, inputs["qkv"], [x.detach() for x in outputs], retain_graph=True)
    assert filled == [found.data_ptr()]
    torch.testing.assert_close(found, inputs["qkv"].detach())
    (without_v,) = torch.autograd.grad([x.sum() for x in outputs[:2]], inputs["qkv"])
    assert without_v[..., :6, :].abs().min() > 0
    assert not without_v[..., 6:, :].any()


def test_values_side_by_side_are_nobodys_business() -> None:
    """NaN in values, or in what comes in for them, stays there."""
    inputs = cases.joint_inputs(BY_NAME["packed"], torch.float32)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    qkv = inputs["qkv"].detach()
    qkv[:, 6:] = torch.nan
    outputs = tw.rope_qkv(qkv.requires_grad_(), 4, 2, rope=rope)
    (dqkv,) = torch.autograd.grad(outputs, qkv, [x.detach() for x in outputs])
    for x in (*outputs[:2], dqkv[:, :6]):
        assert x.isfinite().all()
    assert dqkv[:, 6:].isnan().all()


def test_attention_takes_values_side_by_side() -> None:
    inputs = cases.joint_inputs(TurnCase("", (2, 9)), torch.float64)
    qkv = inputs["qkv"].detach().requires_grad_()
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    q, k, v = qkv.split((4, 2, 2), -2)
    found = []
    for parts in (tw.rope_qkv(qkv, 4, 2, rope=rope), (*tw.rope(q, k, rope=rope), v)):
        o = tw.attention(*parts, mask=tw.causal)
        found.append((o, *torch.autograd.grad(o.square().sum(), qkv)))
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


def test_only_wanted_gradients_are_made() -> None:
    inputs = cases.make_inputs(BY_NAME["batch"], torch.float32)
    q, k = inputs["q"].detach(), inputs["k"]
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    turned_q, turned_k = tw.rope(q, k, rope=rope)
    (dk,) = torch.autograd.grad(turned_k.sum(), k)  # of a gradient whose strides are 0
    back = tw.Rope(rope.cos, -rope.sin, rope.positions)
    assert torch.equal(dk, tw.rope(torch.ones_like(k.detach()), rope=back))
    assert torch.equal(turned_q, tw.rope(q, rope=rope))


def test_the_backward_keeps_neither_q_nor_k() -> None:
    inputs = cases.make_inputs(BY_NAME["batch"], torch.float32)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    sizes: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.shape), lambda x: x):
        tw.rope(inputs["q"], inputs["k"], rope=rope)
    assert sizes == [rope.cos.shape, rope.sin.shape, BY_NAME["batch"].lead]


def test_a_broken_twin_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns_no_gradient_back(call: Any, kept: Any, incoming: Any, gradients: Any) -> None:
        for do, gradient in zip(incoming, gradients.values(), strict=True):
            cpu._turn(call, do, gradient, back=False)

    cases.check(BY_NAME["batch"], torch.float32, "cpu")  # whole, it passes
    monkeypatch.setattr(cpu, "backward", turns_no_gradient_back)
    monkeypatch.setattr(dispatch, "_function", lambda module, name: getattr(cpu, name))
    with pytest.raises(AssertionError, match="dq"):
        cases.check(BY_NAME["batch"], torch.float32, "cpu")


Q, TABLE, HERE = torch.zeros(2, 3, 4, 8), torch.ones(10, 4), torch.arange(6)
ROPE = tw.Rope(TABLE, TABLE, HERE)
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "q_list": ({"q": [1.0]}, "q", "list"),
    "q_nested": ({"q": torch.nested.nested_tensor([torch.zeros(2, 3)])}, "q", "a nested tensor"),
    "q_rank": ({"q": Q[0, 0]}, "q", "(4, 8)"),
    "q_no_heads": ({"q": Q[..., :0, :]}, "q", "(2, 3, 0, 8)"),
    "q_no_dim": ({"q": Q[..., :0]}, "q", "(2, 3, 4, 0)"),
    "q_integers": ({"q": Q.long()}, "q", "torch.int64"),
    "k_float": ({"k": 3.0}, "k", "float"),
    "k_dtype": ({"k": Q.half()}, "k", "torch.float16"),
    "k_elsewhere": ({"k": Q.to("meta")}, "k", "meta"),
    "k_tokens": ({"k": Q[:1]}, "k", "(1, 3, 4, 8)"),
    "k_packed": ({"k": Q.flatten(0, 1)}, "k", "(6, 4, 8)"),
    "k_dim": ({"k": Q[..., :6]}, "k", "(2, 3, 4, 6)"),
    "rope_none": ({"rope": None}, "rope", "NoneType"),
    "rope_tuple": ({"rope": (TABLE, TABLE, HERE)}, "rope", "tuple"),
    "positions_few": ({"rope": tw.Rope(TABLE, TABLE, HERE[:3])}, "rope", "3 positions"),
    "rotary_dim": ({"rope": tw.Rope(torch.ones(10, 5), torch.ones(10, 5), HERE)}, "rope", "rotary_dim 10"),
    "rope_elsewhere": ({"rope": tw.Rope(*(x.to("meta") for x in (TABLE, TABLE, HERE)))}, "rope", "on meta"),
    "position_too_far": ({"rope": tw.Rope(TABLE, TABLE, HERE + 5)}, "rope", "position 10"),
    "position_negative": ({"rope": tw.Rope(TABLE, TABLE, HERE - 1)}, "rope", "position -1"),
    "cos_gradient": ({"rope": tw.Rope(TABLE.clone().requires_grad_(), TABLE, HERE)}, "rope.cos", "gradient"),
    "sin_gradient": ({"rope": tw.Rope(TABLE, TABLE.clone().requires_grad_(), HERE)}, "rope.sin", "gradient"),
    "impl": ({"impl": "other"}, "impl", "other"),
    "inplace_impl": ({"impl": "other", "inplace": True}, "impl", "other"),
    "inplace_gradient": ({"q": Q.clone().requires_grad_(), "inplace": True}, "inplace", "q taking a gradient"),
    "inplace_gradient_k": ({"k": Q.clone().requires_grad_(), "inplace": True}, "inplace", "k taking a gradient"),
    "inplace_stride": ({"q": Q.mT.contiguous().mT, "inplace": True}, "q", "strides (96, 32, 1, 4)"),
    "inplace_shared": ({"k": Q[..., :1, :].expand(Q.shape), "inplace": True}, "k", "strides (96, 32, 0, 1)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, what, got = BAD[name]
    with pytest.raises(InputError) as caught:
        tw.rope(**({"q": Q, "rope": ROPE} | arguments))
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


QKV = torch.zeros(2, 3, 8, 8)
BAD_SIDE_BY_SIDE: dict[str, tuple[dict[str, Any], str, str]] = {
    "list": ({"qkv": [1.0]}, "qkv", "list"),
    "no_heads": ({"qkv": QKV.flatten(-2)[0, 0]}, "qkv", "(64,)"),
    "integers": ({"qkv": QKV.long()}, "qkv", "torch.int64"),
    "heads": ({"num_heads_kv": 3}, "qkv", "8 heads, of shape (2, 3, 8, 8)"),
    "flat": ({"qkv": QKV.flatten(-2)}, "qkv", "3 heads, of shape (2, 3, 64)"),
    "heads_none": ({"num_heads_q": 0, "num_heads_kv": 4}, "num_heads_q", "0"),
    "heads_of_keys_none": ({"num_heads_q": 8, "num_heads_kv": 0}, "num_heads_kv", "0"),
    "heads_float": ({"num_heads_q": 4.0}, "num_heads_q", "4.0"),
    "heads_bool": ({"num_heads_kv": True}, "num_heads_kv", "True"),
    "rope_none": ({"rope": None}, "rope", "NoneType"),
    "positions_few": ({"rope": tw.Rope(TABLE, TABLE, HERE[:3])}, "rope", "3 positions"),
    "cos_gradient": ({"rope": tw.Rope(TABLE.clone().requires_grad_(), TABLE, HERE)}, "rope.cos", "gradient"),
    "impl": ({"impl": "other"}, "impl", "other"),
    "impl_gradient": ({"qkv": QKV.clone().requires_grad_(), "impl": "other"}, "impl", "other"),
}


@pytest.mark.parametrize("name", BAD_SIDE_BY_SIDE)
def test_bad_arguments_side_by_side(name: str) -> None:
    arguments, what, got = BAD_SIDE_BY_SIDE[name]
    with pytest.raises(InputError) as caught:
        tw.rope_qkv(**({"qkv": QKV, "num_heads_q": 4, "num_heads_kv": 2, "rope": ROPE} | arguments))
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


@pytest.mark.parametrize("inplace", [False, True])
def test_kernels_need_a_gpu(inplace: bool) -> None:
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tw.rope(Q, rope=ROPE, inplace=inplace, impl="triton")
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tw.rope_qkv(QKV.clone().requires_grad_(), 4, 2, rope=ROPE, impl="triton")


def test_in_place_under_no_grad() -> None:
    q = torch.randn(2, 3, 4, 8).requires_grad_()
    with torch.no_grad():
        want = tw.rope(q, rope=ROPE)
        tw.rope(q, rope=ROPE, inplace=True)
    assert torch.equal(q, want)
    with torch.inference_mode():
        x = torch.randn(2, 3, 4, 8)
        assert torch.equal(tw.rope(x, rope=ROPE), tw.rope(x.clone(), rope=ROPE, inplace=True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("second", [True, False])
def test_compiles_whole(second: bool, dynamic: bool) -> None:
    torch._dynamo.reset()

    def model(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Any:
        rope = tw.Rope(cos, sin, positions * 1)
        if not second:
            return tw.rope(2.0 * q, rope=rope).sin()
        turned_q, turned_k = tw.rope(2.0 * q, k, rope=rope)
        return turned_q.sin() * turned_k.repeat_interleave(2, -2)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seqlen in (3, 4):
        inputs = cases.make_inputs(TurnCase("", (2, seqlen)), torch.float32)
        wanted = [inputs["q"], inputs["k"]] if second else [inputs["q"]]
        found = []
        for run in (compiled, model):
            o = run(**inputs)
            found.append((o, *torch.autograd.grad(o.sum(), wanted)))
        torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


def _recorded(graphs: list[str]) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def record(graph: Any, _: Any) -> Any:
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=record, bw_compiler=record)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole_side_by_side(dynamic: bool) -> None:
    """With nothing copied or put together beside the operators."""
    torch._dynamo.reset()

    def model(
        qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, v = tw.rope_qkv(2.0 * qkv, heads, 2, rope=tw.Rope(cos, sin, positions * 1))
        return q.sin(), k.cos(), v.exp()

    graphs: list[str] = []
    compiled = torch.compile(model, backend=_recorded(graphs), fullgraph=True, dynamic=dynamic)
    for seqlen in (3, 4):
        inputs = cases.joint_inputs(TurnCase("", (2, seqlen)), torch.float32)
        found = []
        for run in (compiled, model):
            outputs = run(heads=4, **inputs)
            found.append((*outputs, *torch.autograd.grad(outputs, inputs["qkv"], [x.detach() for x in outputs])))
        torch.testing.assert_close(*found, rtol=0.0, atol=0.0)
    forward, backward = graphs[:2]
    assert (forward.count("tilewise.rope.default"), backward.count("tilewise.rope_qkv_backward.default")) == (1, 1)
    assert not any(name in graph for graph in graphs for name in ("aten.cat", "aten.clone", "aten.add"))
    if dynamic:
        assert len(graphs) == 2


@pytest.mark.parametrize("second", [True, False])
def test_compiles_whole_in_place(second: bool) -> None:
    torch._dynamo.reset()

    def step(q: torch.Tensor, k: torch.Tensor, rope: tw.Rope) -> torch.Tensor:
        q.mul_(2.0)
        tw.rope(q, k if second else None, rope=rope, inplace=True)
        return q + 1.0

    found = []
    inputs = cases.make_inputs(BY_NAME["joint"], torch.float32)
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"])
    for run in (torch.compile(step, backend="aot_eager", fullgraph=True), step):
        q, k = (cases.laid(BY_NAME["joint"], inputs[name].detach()) for name in ("q", "k"))
        found.append((run(q, k, rope), q, k))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[0][2], inputs["k"]) != second


def test_operators_pass_opcheck() -> None:
    q, k = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, 2, 8, requires_grad=True)
    cos, sin, positions = torch.randn(10, 3), torch.randn(10, 3), HERE.view(2, 3)
    numbers = "{'heads_q': 4, 'heads_k': 2, 'dim': 8, 'interleaved': True, 'dtype': 'torch.float32'}"
    how = f"(['q', 'k', 'cos', 'sin', 'positions'], {numbers})"
    torch.library.opcheck(torch.ops.tilewise.rope.default, ([q, k, cos, sin, positions], how, "cpu"))
    incoming = (q.detach(), k.detach(), k.detach().mT.contiguous().mT)
    torch.library.opcheck(torch.ops.tilewise.rope_qkv_backward.default, (*incoming, cos, sin, positions, True, "cpu"))
    for second in (k.detach(), None):
        operands = (q.detach(), second, cos, sin, positions, False, "cpu")
        torch.library.opcheck(torch.ops.tilewise.rope_inplace.default, operands)


def test_no_tokens() -> None:
    q, k = torch.zeros(0, 4, 8, requires_grad=True), torch.zeros(0, 2, 8, requires_grad=True)
    turned = tw.rope(q, k, rope=tw.Rope(TABLE, TABLE, HERE[:0]))
    torch.autograd.backward(turned, [torch.ones_like(x) for x in turned])
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
    qkv = torch.zeros(0, 8, 8, requires_grad=True)
    q, k, v = tw.rope_qkv(qkv, 4, 2, rope=tw.Rope(TABLE, TABLE, HERE[:0]))
    (q.sum() + k.sum() + v.sum()).backward()
    assert (q.shape, k.shape, v.shape, qkv.grad.shape) == ((0, 4, 8), (0, 2, 8), (0, 2, 8), (0, 8, 8))
