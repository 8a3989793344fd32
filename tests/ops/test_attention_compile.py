"""The custom operators (opcheck) and torch.compile: whole graphs, as the first call of a process, equal to eager."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw
from tests import fresh
from tilewise.adapters import sdpa
from tilewise.core.errors import FormulaError, InputError, UnsupportedError
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged

CHECKED = ("plain", "causal", "document_window", "alibi_causal", "relative_bias", "bias_batch", "sink_causal",
           "dropout", "packed_cross_causal", "packed_window_sink", "mqa", "head_dim_v_wider")  # fmt: skip


def operator_arguments(name: str) -> tuple[Any, ...]:
    """Arguments of `tilewise::attention_forward` for a named case."""
    from tilewise.ops.attention import problem, table, torch_op

    case = CASES[name] if CASES[name].packed else CASES[name].with_(seqlen_q=min(CASES[name].seqlen_q, 20), seqlen_k=20)
    inputs = make_inputs(case, torch.float32)
    call = problem.make_call(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    return torch_op.operator_arguments(table.named("cpu_tiled"), call)


@pytest.mark.parametrize("flat", [False, True])
def test_opcheck_over_pages(flat: bool) -> None:
    from tilewise.ops.attention import problem, table, torch_op

    inputs = make_inputs(CASES["packed_cross_causal"], torch.float32)
    pool = paged(inputs, 4, flat=flat)
    with torch.no_grad():
        arguments = inputs.arguments() | {"layout": pool.layout}
        call = problem.make_call(inputs.q.detach(), pool.k.nan_to_num(), pool.v.nan_to_num(), **arguments)
        arguments = torch_op.operator_arguments(table.named("cpu_tiled"), call)
        torch.library.opcheck(torch.ops.tilewise.attention_forward.default, arguments)


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck_of_the_forward_operator(name: str) -> None:
    torch.library.opcheck(torch.ops.tilewise.attention_forward.default, operator_arguments(name))


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck_of_the_backward_operator(name: str) -> None:
    """It has no derivative of its own (attention is differentiable once), so its inputs take no gradient."""
    detached = (x.detach() if isinstance(x, torch.Tensor) else x for x in operator_arguments(name))
    arguments = [
        [t.detach() for t in x] if isinstance(x, list) and x and isinstance(x[0], torch.Tensor) else x for x in detached
    ]
    with torch.no_grad():
        o, lse = torch.ops.tilewise.attention_forward(*arguments)
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            torch.ops.tilewise.attention_backward.default, (torch.randn_like(o), dlse, o, lse, *arguments)
        )


def run_fresh(program: str) -> None:
    """Run a program in a process in which nothing has been traced or compiled yet."""
    fresh.check(PREAMBLE + program)


PREAMBLE = """
import torch, tilewise as tw
torch.manual_seed(0)
torch.set_num_threads(1)
q, k, v = (torch.randn(2, 40, 4, 16, requires_grad=True) for _ in range(3))
slopes = torch.rand(4, requires_grad=True)
prefix = torch.tensor([3, 30])
ids = torch.arange(40) // 9
sink = torch.randn(4, requires_grad=True)

def check(fn, *leaves, backend="aot_eager", fresh=True):
    if fresh:
        torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    got = compiled(q, k, v)  # the compiled call comes first
    want = fn(q, k, v)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    wanted = (q, k, v, *leaves)
    for g, w in zip(torch.autograd.grad(got.square().sum(), wanted), torch.autograd.grad(want.square().sum(), wanted)):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["graph_break"] == {}, torch._dynamo.utils.counters["graph_break"]
"""
NAMED = """
check(lambda q, k, v: tw.attention(q, k, v))
check(lambda q, k, v: tw.attention(q, k, v, mask=tw.causal))
check(lambda q, k, v: tw.attention(q, k, v, mask=tw.causal & tw.window(7) & tw.document(ids)))
check(lambda q, k, v: tw.attention(q, k, v, mask=tw.causal | tw.prefix(prefix), score=tw.softcap(5.0)))
mask = tw.neighborhood((5, 8), (3, 3))  # made outside
check(lambda q, k, v: tw.attention(q, k, v, mask=mask, score=tw.alibi(slopes), sink=sink), slopes, sink)
windows = [(3, 1), (1, (0, 2)), (2, 2), (1, 1)]
check(lambda q, k, v: tw.attention(q, k, v, mask=tw.sliding_tile((5, 8), (2, 3), windows)))
order = tw.TokenOrder((5, 7), (2, 3), "hilbert", text=5)
sliding = tw.sliding_tile((5, 7), (2, 3), (1, 3), order="hilbert", text=5)
check(lambda q, k, v: order.undo(tw.attention(*map(order.apply, (q, k, v)), mask=sliding)))
"""
LAMBDAS = """
check(lambda q, k, v: tw.attention(q, k, v, mask=lambda b, h, i, j: (i >= j) | (j < prefix[b])))
check(lambda q, k, v: tw.attention(q, k, v, mask=lambda b, h, i, j: ids[i] == ids[j],
                                   score=lambda s, b, h, i, j: s + slopes[h] * (j - i)), slopes)
check(lambda q, k, v: tw.attention(q, k, v, score=lambda s, b, h, i, j: torch.where(i >= j, torch.tanh(s), -s)))
check(lambda q, k, v: tw.attention(q, k, v, mask=lambda b, h, i, j: torch.logical_not(i < j) | ((i == 3) ^ (j < 9))))
not_near = tw.causal & ~tw.window(3)  # made outside
check(lambda q, k, v: tw.attention(q, k, v, mask=not_near))
o, lse = torch.compile(lambda: tw.attention_with_lse(q, k, v, mask=tw.causal, dropout=0.25, seed=3), fullgraph=True,
                       backend="aot_eager")()
want = tw.attention_with_lse(q, k, v, mask=tw.causal, dropout=0.25, seed=3)
torch.testing.assert_close((o, lse), want)
cu = torch.tensor([0, 10, 10, 40], dtype=torch.int32)
q, k, v = (x[0].detach().requires_grad_() for x in (q, k, v))
check(lambda q, k, v: tw.attention(q, k, v, mask=tw.causal, layout=tw.Packed(cu)))
"""
INDUCTOR = """
check(lambda q, k, v: tw.attention(q * 2.0, k, v, mask=tw.causal & tw.window(9), score=tw.alibi(slopes)) + 1.0, slopes,
      backend="inductor")
"""
NUMBERS = """
torch._dynamo.reset()
def fn(q, width, cap):
    return tw.attention(q, q, q, mask=lambda b, h, i, j: (i - j - width < 0) & (i >= j), score=tw.softcap(cap))
compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
for width, cap in ((4, 2.0), (5, 3.0), (11, 4.5), (30, 5.5)):  # dynamo makes them symbolic on the second call
    torch.testing.assert_close(compiled(q, width, cap), fn(q, width, cap), rtol=1e-5, atol=1e-5)
def window(q, width):
    return tw.attention(q, q, q, mask=tw.window(width) & tw.chunked(width))
compiled = torch.compile(window, fullgraph=True, backend="aot_eager")
for width in (4, 5, 11):
    torch.testing.assert_close(compiled(q, width), window(q, width), rtol=1e-5, atol=1e-5)
ids, ones, twos = torch.arange(40) + 2**59, torch.ones(40), torch.arange(40) % 2 * 2.0
def far(q, number, other):
    mask = lambda b, h, i, j: (ids[j] - number > 0) & (i - j + 0.5 > -9.0)
    score = lambda s, b, h, i, j: s * 0.5 + torch.where(ids[i] - other < 0, ones[j], twos[j])
    return tw.attention(q, q, q, mask=mask, score=score)
compiled = torch.compile(far, fullgraph=True, backend="aot_eager")
for at in (4, 5, 11):  # a float would make them multiples of 128
    torch.testing.assert_close(compiled(q, 2**59 + at, 2**59 + 2 * at), far(q, 2**59 + at, 2**59 + 2 * at))
scaled = lambda q, scale: tw.attention(q, q, q, scale=scale)
compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
for scale in (0.1, 0.2, 0.3):
    torch.testing.assert_close(compiled(q, scale), scaled(q, scale), rtol=1e-5, atol=1e-5)
"""
SHAPES = """
torch._dynamo.reset()
fn = lambda q: tw.attention(q, q, q, mask=tw.causal, score=tw.alibi(slopes))
compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
for seqlen in (8, 17, 33):
    x = torch.randn(2, seqlen, 4, 16)
    torch.testing.assert_close(compiled(x), fn(x), rtol=1e-5, atol=1e-5)
for fn in (
    lambda q: tw.attention(q, q, q, scale=q.shape[-1] ** -0.5),
    lambda q: tw.attention(q, q, q, scale=1 / q.shape[1]),
):
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (8, 17, 33):
        x = torch.randn(2, seqlen, 4, 16)
        torch.testing.assert_close(compiled(x), fn(x), rtol=1e-5, atol=1e-5)
"""
PROGRAMS = {"named": NAMED, "lambdas": LAMBDAS, "inductor": INDUCTOR, "numbers": NUMBERS, "shapes": SHAPES}


CHANGING: dict[str, Callable[[int], Any]] = {  # masks of an int that becomes symbolic on the second call
    "compared": lambda w: lambda b, h, i, j: i - j < w,
    "compared_with_a_position": lambda w: lambda b, h, i, j: w > j,
    "equal": lambda w: lambda b, h, i, j: (i == j) | (j == w) | (w != i - 1),
    "not": lambda w: lambda b, h, i, j: ~(i < j) & ~(j == w),
    "left": lambda w: lambda b, h, i, j: (w - j < i) & (w // (j + 1) > -1) | (w % (j + 1) == 1) | (2.0**j > w),
    "right": lambda w: lambda b, h, i, j: (i // w == j // w) | ((i - j) % w == 0) | (i**2 < w),
    "bits": lambda w: lambda b, h, i, j: (1 << j % 4) + (w << 1) > (i ^ w) + (j & w),
    "captured": lambda w: lambda b, h, i, j: (IDS[i] == IDS[j]) & (IDS[IDS[i]] <= w) & (j < w + LIMIT),
    "methods": lambda w: lambda b, h, i, j: (i.clamp(min=w) - j).abs().lt(w).logical_or(j.eq(0)),
    "functions": lambda w: lambda b, h, i, j: torch.where(torch.maximum(i, j) - w < 9, j < w, torch.abs(i - j) < 3),
    "floats": lambda w: lambda b, h, i, j: (i.float() * 0.5 > j.to(torch.float64)) | (-j > -w / 2),
    "constant": lambda w: lambda b, h, i, j: w > 3,
    "abs_without": lambda w: lambda b, h, i, j: abs(i - j) * 2 < 9 + IDS[i],
}
IDS, LIMIT = torch.arange(20) // 7, torch.tensor(3)


@pytest.mark.parametrize("name", CHANGING)
def test_a_changing_int_may_be_used_as_any(name: str) -> None:
    q = torch.randn(1, 20, 2, 8)
    torch._dynamo.reset()
    fn = lambda q, width: tw.attention(q, q, q, mask=CHANGING[name](width))  # noqa: E731
    compiled = torch.compile(fn, fullgraph=True, backend="eager")
    for width in (4, 5, 7):
        torch.testing.assert_close(compiled(q, width), fn(q, width), rtol=1e-5, atol=1e-5)


def test_a_changing_int_in_a_score_has_gradients() -> None:
    slopes = torch.rand(2, requires_grad=True)
    q = torch.randn(1, 20, 2, 8, requires_grad=True)
    torch._dynamo.reset()

    def fn(q: torch.Tensor, width: int) -> torch.Tensor:
        score = lambda s, b, h, i, j: torch.where(i - j < width, s * 2.0 - slopes[h] * (i - j), torch.tanh(s))  # noqa: E731
        return tw.attention(q, q, q, score=score)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for width in (4, 5, 7):
        got, want = compiled(q, width), fn(q, width)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(
            *(torch.autograd.grad(o.square().sum(), (q, slopes)) for o in (got, want)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.xfail(reason="PyTorch 2.13: dynamo compares no object with a symbolic int, and abs() asks no tensor")
def test_a_changing_int_may_be_compared_beside_the_builtin_abs() -> None:
    q = torch.randn(1, 20, 2, 8)
    torch._dynamo.reset()
    fn = lambda q, width: tw.attention(q, q, q, mask=lambda b, h, i, j: abs(i - j) < width)  # noqa: E731
    compiled = torch.compile(fn, fullgraph=True, backend="eager")
    for width in (4, 5):
        compiled(q, width)


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles_whole_as_the_first_call_of_a_process(name: str) -> None:
    if name != "inductor":
        run_fresh(PROGRAMS[name])
        return
    # Once in a process that has not even imported PyTorch's compiler, which costs seconds.
    done = subprocess.run([sys.executable, "-c", PREAMBLE + INDUCTOR], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_the_reference_has_no_gradient_under_compile() -> None:
    q = torch.randn(1, 20, 2, 8)
    named = torch.compile(lambda q: tw.attention(q, q, q, mask=tw.causal, impl="reference"), backend="eager")
    torch.testing.assert_close(named(q), tw.attention(q, q, q, mask=tw.causal))
    with pytest.raises(UnsupportedError, match=r"no gradients inside torch\.compile"):
        named(q.requires_grad_())


def test_an_error_under_compile_is_the_librarys_own() -> None:
    """Where a graph may break; with fullgraph=True PyTorch wraps every exception in its own."""
    q = torch.randn(1, 20, 2, 8)
    with pytest.raises(InputError, match=r"dropout: got 2\.0"):
        torch.compile(lambda q: tw.attention(q, q, q, dropout=2.0), backend="eager")(q)


def test_what_only_values_tell_is_checked_when_a_compiled_region_runs() -> None:
    q, table = torch.randn(1, 20, 2, 8), torch.zeros(12)
    compiled = torch.compile(lambda q, at: tw.attention(q, q, q, score=lambda s, b, h, i, j: s + table[at[j]]),
                             backend="aot_eager", fullgraph=True)  # fmt: skip
    assert compiled(q, torch.arange(20) // 2).shape == q.shape
    with pytest.raises(FormulaError, match=r"score: index 0 into captured tensor 0 .*reaches 0 to 19"):
        compiled(q, torch.arange(20))
    packed = torch.compile(lambda q, cu: tw.attention(q, q, q, layout=tw.Packed(cu)), backend="aot_eager",
                           fullgraph=True)  # fmt: skip
    assert packed(q[0], torch.tensor([0, 3, 20], dtype=torch.int32)).shape == (20, 2, 8)
    with pytest.raises(InputError, match="layout cu_seqlens_q: got 3 after 22"):
        packed(q[0], torch.tensor([0, 22, 3, 20], dtype=torch.int32))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace.*:DeprecationWarning")
def test_a_trace_keeps_the_operator_and_not_the_tiles_of_its_example() -> None:
    q = torch.randn(1, 2, 300, 8)
    masks = [torch.eye(300, dtype=torch.bool), torch.rand(300, 300) > 0.5]
    traced = torch.jit.trace(lambda q, m: sdpa.scaled_dot_product_attention(q, q, q, attn_mask=m), (q, masks[0]))
    for m in masks:
        torch.testing.assert_close(traced(q, m), F.scaled_dot_product_attention(q, q, q, attn_mask=m))
