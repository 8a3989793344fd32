"""Launching: CUDA graphs, streams, devices, torch.compile, autocast, and how often kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from tests.gpu.draws import draw
from tests.gpu.matrix import DEVICE
from tilewise.ops.attention import gluon_attention
from tilewise.testing import properties
from tilewise.testing.graphs import captured

Tensors = tuple[torch.Tensor, ...]
on_both = pytest.mark.parametrize("impl", ["triton", "hopper"])


def leaves(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [draw(*shape, seed=n, dtype=dtype).requires_grad_() for n in range(3)]


def forward_backward(
    impl: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, **arguments: Any
) -> Tensors:
    """(o, lse, dk, dv, dq)"""
    o, lse = tw.attention_with_lse(q, k, v, impl=impl, **arguments)
    return (o.detach(), lse.detach(), *torch.autograd.grad(o, (k, v, q), do))


# CUDA graphs -------------------------------------------------------------------------------------------------------


def same(got: Tensors, want: Tensors, impl: str = "triton") -> None:
    """The same bits, but for dq of the Hopper kernels, which is summed in any order."""
    names = ("o", "lse", "dk", "dv", "dq")
    unordered = properties.Setting(impl).unordered
    properties.same_bits(
        dict(zip(names, got, strict=False)), dict(zip(names, want, strict=False)), "one call", unordered
    )


@on_both
def test_a_graph_replays_with_other_inputs_and_other_captured_values(impl: str) -> None:
    q, k, v = leaves(2, 300, 4, 64)
    do, ids = draw(2, 300, 4, 64, seed=9), torch.arange(300, device=DEVICE) // 50
    slopes = torch.rand(4, device=DEVICE)

    def step() -> Tensors:
        return forward_backward(impl, q, k, v, do, mask=tw.causal & tw.document(ids), score=tw.alibi(slopes))

    graph, results = captured(step)
    for round_ in range(3):
        with torch.no_grad():
            for n, x in enumerate((q, k, v, do)):
                x.copy_(draw(*x.shape, seed=100 * round_ + n))
            ids.copy_(torch.arange(300, device=DEVICE) // (20 + 30 * round_))
            slopes.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        got = tuple(x.clone() for x in results)
        same(got, step(), impl)


@on_both
def test_lists_that_are_kept_serve_calls_in_turn_alone(impl: str) -> None:
    """As many calls as there are give what the first one gave, also of a graph and of other streams, and whatever count
    stands behind the lists.
    """
    q, k, v = leaves(1, 1024, 4, 64)
    do, mask = draw(1, 1024, 4, 64, seed=9), tw.sliding_tile((8, 16, 8), (4, 8, 4), (1, 2, 1))
    step = lambda: forward_backward(impl, q, k, v, do, mask=mask)  # noqa: E731
    first = step()
    for _ in range(3):
        same(step(), first, impl)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        same(step(), first, impl)
    torch.cuda.current_stream().wait_stream(other)
    graph, found = captured(step)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        same(found, first, impl)
    same(step(), first, impl)


@on_both
def test_a_packed_graph_replays_with_other_lengths(impl: str) -> None:
    q, k, v = leaves(512, 2, 64)
    do = draw(512, 2, 64, seed=9)
    cu = torch.tensor([0, 100, 300, 512], dtype=torch.int32, device=DEVICE)
    step = lambda: forward_backward(impl, q, k, v, do, mask=tw.causal, layout=tw.Packed(cu))  # noqa: E731
    graph, results = captured(step)
    for ends in ([0, 1, 2, 512], [0, 256, 256, 512], [0, 511, 511, 512]):
        cu.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        got = tuple(x.clone() for x in results)
        same(got, step(), impl)


def test_a_decode_graph_replays_with_other_inputs() -> None:
    q, k = draw(4, 1, 8, 128), draw(4, 3000, 2, 128, seed=1)
    lengths = torch.full((4,), 3000, device=DEVICE)

    def step() -> Tensors:
        with torch.no_grad():
            return tw.attention_with_lse(q, k, k, mask=tw.lengths(lengths), impl="triton_decode")

    graph, results = captured(step)
    for used in (2999, 64, 1):
        q.copy_(draw(4, 1, 8, 128, seed=used))
        lengths.fill_(used)
        graph.replay()
        torch.cuda.synchronize()
        got = tuple(x.clone() for x in results)
        same(got, step())


def test_dropout_in_a_graph_draws_anew_and_its_backward_drops_the_same() -> None:
    """With one-hot values o is the matrix of weights, so dv = o^T do tells which weights the backward dropped."""
    q, k, _ = leaves(1, 64, 2, 64, dtype=torch.float32)
    v = torch.eye(64, device=DEVICE)[None, :, None].expand(1, 64, 2, 64).contiguous().requires_grad_()
    do = draw(1, 64, 2, 64, seed=9, dtype=torch.float32)
    graph, results = captured(lambda: forward_backward("triton", q, k, v, do, dropout=0.5))
    zeros = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        o, dv = results[0].clone(), results[3].clone()
        zeros.append(o == 0)
        assert 0.3 < float(zeros[-1].float().mean()) < 0.7
        torch.testing.assert_close(dv, torch.einsum("bihj,bihd->bjhd", o, do), rtol=1e-4, atol=1e-4)
    assert not torch.equal(zeros[0], zeros[1])
    assert not torch.equal(zeros[1], zeros[2])


# streams and devices -----------------------------------------------------------------------------------------------


@on_both
def test_work_is_ordered_with_the_current_stream(impl: str) -> None:
    q, k, v = leaves(2, 700, 4, 64)
    do = draw(2, 700, 4, 64, seed=9)
    ids = torch.arange(700, device=DEVICE) // 90
    want = forward_backward(impl, q, k, v, do, mask=tw.document(ids))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        with torch.cuda.stream(stream):
            late = [torch.zeros_like(x).requires_grad_() for x in (q, k, v)]
            torch.cuda._sleep(20_000_000)  # inputs come late: a launch on another stream would read zeros
            with torch.no_grad():
                for empty, full in zip(late, (q, k, v), strict=True):
                    empty.copy_(full)
            got = forward_backward(impl, *late, do, mask=tw.document(ids))
        stream.synchronize()
        same(got, want, impl)


@triton.jit
def occupy(X, nanoseconds):
    """Registers of a multiprocessor, for so long."""
    begin = tl.extra.cuda.globaltimer()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(X + at)
    while tl.extra.cuda.globaltimer() - begin < nanoseconds:
        x += 1.0
    tl.store(X + at, x)


@on_both
@pytest.mark.parametrize("microseconds", [100, 200, 400, 800])
def test_programs_may_come_late(impl: str, microseconds: int) -> None:
    """Another kernel has some multiprocessors when the backward begins. Its items are of very unequal length (all
    queries see the first keys), and its heads so many that late programs begin far behind unfinished ones.
    """
    q, k, v = leaves(4, 8192, 16, 128)
    do = draw(4, 8192, 16, 128, seed=9)
    mask = tw.window(64) | tw.mask(lambda b, h, i, j: (j < 128) & (j <= i))
    want = forward_backward(impl, q, k, v, do, mask=mask)
    o, lse = tw.attention_with_lse(q, k, v, mask=mask, impl=impl)
    busy, side = torch.zeros(16 * 1024, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(side):
            occupy[(16,)](busy, 1000 * microseconds, num_warps=8)
        grads = torch.autograd.grad(o, (k, v, q), do, retain_graph=True)
        torch.cuda.synchronize()
        same((o.detach(), lse.detach(), *grads), want, impl)


@pytest.mark.parametrize("quantize", [None, tw.Sage("fp8")], ids=["exact", "fp8"])
def test_launches_leave_the_count_of_items_at_0(quantize: Any) -> None:
    """On the default stream all that deal items out share one count (`gluon_attention.counter_of`)."""
    cu = torch.tensor([0, 900, 900, 3000, 4100], dtype=torch.int32, device=DEVICE)
    row = {"impl": "hopper" if quantize is None else "hopper_codes", "quantize": quantize}
    of_rows = {"mask": tw.causal} | row
    in_rows, packed = (draw(2, 5000, 4, 64),) * 3, (draw(4100, 4, 64),) * 3
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: tw.attention(*in_rows, **of_rows),
        lambda: tw.attention(*packed, layout=tw.Packed(cu), **row),  # with slots that have nothing to do
        lambda: tw.attention(*(x[:, :2500] for x in in_rows), **of_rows),
    ]
    first = [call() for call in calls]
    count = gluon_attention._none_dealt(first[0].device)
    asked = gluon_attention._none_dealt.cache_info().hits
    for _ in range(3):
        for call, want in zip(calls, first, strict=True):
            assert int(count) == 0
            assert torch.equal(call(), want)
    assert gluon_attention._none_dealt.cache_info().hits == asked + 9


@on_both
def test_streams_may_share_the_gpu(impl: str) -> None:
    """Programs that wait for others of their kernel must not wait for ever when another kernel has those's places."""
    q, k, v = leaves(40, 600, 8, 64)
    do = draw(40, 600, 8, 64, seed=9)
    want = forward_backward(impl, q, k, v, do, mask=tw.causal)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(10):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(forward_backward(impl, q, k, v, do, mask=tw.causal))
        torch.cuda.synchronize()
        for got in found:
            same(got, want, impl)


@on_both
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tensors_decide_the_device(impl: str) -> None:
    q, k, v = leaves(1, 200, 2, 64)
    do = draw(1, 200, 2, 64, seed=9)
    want = forward_backward(impl, q, k, v, do, mask=tw.causal)
    assert torch.cuda.current_device() == 0
    there = [x.detach().to("cuda:1").requires_grad_() for x in (q, k, v)]
    got = forward_backward(impl, *there, do.to("cuda:1"), mask=tw.causal)
    assert torch.cuda.current_device() == 0
    same(tuple(x.to("cuda:0") for x in got), want, impl)


# torch.compile and autocast ----------------------------------------------------------------------------------------

MODELS: dict[str, Callable[..., torch.Tensor]] = {
    "causal": lambda q, k, v, slopes, ids: tw.attention(q * 2.0, k, v, mask=tw.causal).sin(),
    "alibi": lambda q, k, v, slopes, ids: tw.attention(q, k + 1.0, v, mask=tw.window(40), score=tw.alibi(slopes)) * 3.0,
    "document": lambda q, k, v, slopes, ids: tw.attention(
        q, k, v, mask=lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    ),
    "dropout": lambda q, k, v, slopes, ids: tw.attention(q, k, v, dropout=0.25, seed=3, score=tw.softcap(20.0)),
}


@pytest.mark.parametrize("name", MODELS)
def test_inductor_compiles_it_whole(name: str) -> None:
    torch._dynamo.reset()
    q, k, v = leaves(2, 130, 4, 64)
    slopes = torch.rand(4, device=DEVICE, requires_grad=True)
    ids = torch.arange(130, device=DEVICE) // 30
    model = MODELS[name]
    compiled = torch.compile(model, fullgraph=True)
    got, want = compiled(q, k, v, slopes, ids), model(q, k, v, slopes, ids)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    wanted = (q, k, v, slopes) if name == "alibi" else (q, k, v)
    for one, other in zip(*(torch.autograd.grad(o.float().square().sum(), wanted) for o in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_inductor_with_cuda_graphs() -> None:
    torch._dynamo.reset()
    model = lambda q, k, v: tw.attention(q, k, v, mask=tw.causal) + 1.0  # noqa: E731
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            q, k, v = (draw(1, 200, 2, 64, seed=10 * seed + n) for n in range(3))
            torch.testing.assert_close(compiled(q, k, v).clone(), model(q, k, v), rtol=2e-2, atol=2e-2)


def test_autocast_leaves_dtypes_alone_and_gradients_reach_float32_weights() -> None:
    x, weight = draw(2, 100, 128, dtype=torch.float32), draw(384, 128, seed=1, dtype=torch.float32).requires_grad_()
    found = []
    for cast in (True, False):
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            joint = torch.nn.functional.linear(x if cast else x.bfloat16(), weight if cast else weight.bfloat16())
            q, k, v = joint.view(2, 100, 3, 2, 64).unbind(2)
            o = tw.attention(q, k, v, mask=tw.causal, impl="triton")
        assert o.dtype == torch.bfloat16
        found.append((o, *torch.autograd.grad(o.float().square().sum(), weight)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


# compilations ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """A list that grows with every kernel variant that Triton makes, from its disk cache or not."""
    import triton

    found: list[str] = []

    def listener(*, src: Any, **_: Any) -> None:
        found.append(src.name)

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listener
    yield found
    triton.knobs.compilation.listener = before


def test_other_numbers_tensors_and_lengths_compile_nothing(compilations: list[str]) -> None:
    def step(
        width: int, cap: float, seqlen_q: int, seqlen_k: int, batch: int, scale: float, dropout: float, size: int
    ) -> None:
        q = draw(batch, seqlen_q, 4, 64).requires_grad_()
        k, v = (draw(batch, seqlen_k, 2, 64, seed=n).requires_grad_() for n in (1, 2))
        ids = torch.arange(seqlen_k, device=DEVICE).expand(batch, -1).contiguous() // size
        slopes = torch.rand(batch, 4, device=DEVICE).requires_grad_()
        arguments = {"scale": scale, "dropout": dropout, "seed": width}
        score = tw.alibi(slopes) >> tw.softcap(cap)
        for mask in (
            tw.window(width),
            tw.causal & tw.document(ids),
            tw.lengths(torch.full((batch,), width, device=DEVICE)),
        ):
            o = tw.attention(q, k, v, mask=mask, score=score, impl="triton", **arguments)
            torch.autograd.grad(o, (q, k, v, slopes), torch.ones_like(o))
        with torch.no_grad():
            tw.attention(q[:, -3:], k, v, mask=tw.window(width), score=score, scale=scale, impl="triton_decode")

    step(100, 30.0, 256, 256, 2, 0.125, 0.1, 50)
    assert compilations, "the listener counts nothing: this test could not fail"
    compilations.clear()
    for width in (1, 2, 16, 17, 4096):
        step(width, 30.0, 256, 256, 2, 0.125, 0.1, 50)
    step(100, 1.0, 256, 256, 2, 0.125, 0.1, 50)
    step(100, 30.0, 256, 256, 2, 1.0, 0.5, 16)
    for seqlen_q, seqlen_k in ((255, 256), (16, 1024), (300, 301), (37, 1000)):
        step(100, 30.0, seqlen_q, seqlen_k, 2, 0.125, 0.1, 50)
    for batch in (1, 3, 16):
        step(100, 30.0, 256, 256, batch, 0.125, 0.1, 50)
    assert compilations == []


def test_other_packed_lengths_compile_nothing(compilations: list[str]) -> None:
    def step(lengths: list[int]) -> None:
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        q, k, v = leaves(sum(lengths), 2, 64)
        mask = tw.causal & tw.dilated(3)  # no other test's: what a process has compiled before is not counted
        o = tw.attention(q, k, v, mask=mask, layout=tw.Packed(cu), impl="triton")
        torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    step([100, 28])
    assert compilations, "the listener counts nothing: this test could not fail"
    compilations.clear()
    for lengths in ([128], [1] * 16, [0, 5, 0], [300, 2, 77, 512]):
        step(lengths)
    assert compilations == []
