"""Sizes that overflow narrow integers: offsets beyond 2**31 elements, grids beyond 65,535, long sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tilewise as tw
from tests.gpu.draws import draw
from tests.gpu.matrix import DEVICE

GIB = 2**30
pytestmark = pytest.mark.xdist_group("large")  # one after another: two at a time would not fit


@pytest.fixture(autouse=True)
def _memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the GPU with most memory free."""
    free, gpu = max((torch.cuda.mem_get_info(n)[0], n) for n in range(torch.cuda.device_count()))
    if free < 60 * GIB:
        pytest.skip("needs 60 GiB of free GPU memory")
    with torch.cuda.device(gpu):
        yield


@pytest.mark.parametrize("impl", ["triton", "hopper"])
@pytest.mark.parametrize("heads_kv", [128, 1], ids=["long_keys", "long_queries"])
def test_tensors_of_more_than_two_to_the_31_elements(heads_kv: int, impl: str) -> None:
    """The last rows of a (1, 2**17 + 256, 128, 128) problem equal a small problem with copies of those rows."""
    seqlen, heads, dim, width, tail = 2**17 + 256, 128, 128, 64, 200
    assert seqlen * heads * dim > 2**31
    q, do = (draw(1, seqlen, heads, dim, seed=n) for n in (0, 3))
    k, v = (draw(1, seqlen, heads_kv, dim, seed=n) for n in (1, 2))
    do[:, :-tail] = 0
    for x in (q, k, v):
        x.requires_grad_()
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.window(width), impl=impl)
    found = torch.autograd.grad(o, (q, k, v), do)
    keys = tail + width - 1  # what the last `tail` queries see
    small = [x.detach()[:, -keys:].clone().requires_grad_() for x in (q, k, v)]
    want_o, want_lse = tw.attention_with_lse(*small, mask=tw.window(width), impl=impl)
    want = torch.autograd.grad(want_o, small, do[:, -keys:].clone())
    torch.testing.assert_close(o[:, -tail:], want_o[:, -tail:], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[..., -tail:], want_lse[..., -tail:], rtol=1e-4, atol=1e-4)
    for got, grad in zip(found, want, strict=True):
        torch.testing.assert_close(got[:, -keys:], grad, rtol=5e-2, atol=5e-2)
        assert not bool(got[:, : -keys - 1].any()), "rows before the last have no upstream gradient"


def test_captured_tensor_of_more_than_two_to_the_31_elements() -> None:
    """A dense bias (1, 1, 47000, 47000): its offsets need 64 bits."""
    seqlen = 47_000
    assert seqlen**2 > 2**31
    bias = torch.zeros(seqlen, seqlen, dtype=torch.bfloat16, device=DEVICE)
    bias[-300:] = draw(300, seqlen, seed=1)
    q, k, v = (draw(1, seqlen, 1, 64, seed=n) for n in (2, 3, 4))
    with torch.no_grad():
        got = tw.attention(q, k, v, score=tw.bias(bias), impl="triton")[:, -300:]
        want = tw.attention(q[:, -300:].clone(), k, v, score=tw.bias(bias[-300:].clone()), impl="triton")
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_more_batch_elements_times_heads_than_a_grid_dimension_holds(impl: str) -> None:
    """70,000 sequences of 16 rows, dense and packed, give the same."""
    batch, seqlen = 70_000, 16
    q, k, v = (draw(batch, seqlen, 2, 32, seed=n) for n in range(3))
    cu = torch.arange(0, batch * seqlen + 1, seqlen, dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        dense = tw.attention(q, k, v, mask=tw.causal, impl=impl)
        flat = [x.reshape(-1, 2, 32) for x in (q, k, v)]
        packed = tw.attention(*flat, mask=tw.causal, layout=tw.Packed(cu), impl=impl)
    torch.testing.assert_close(packed.view_as(dense), dense, rtol=2e-2, atol=2e-2)
    for row in (0, 65_535, 65_536, batch - 1):
        one = slice(row, row + 1)
        with torch.no_grad():
            want = tw.attention(q[one], k[one], v[one], mask=tw.causal, impl="reference")
        torch.testing.assert_close(dense[one], want, rtol=2e-2, atol=2e-2)


def test_decode_over_half_a_million_keys() -> None:
    k, v = (draw(1, 2**19 + 7, 2, 128, seed=n) for n in range(2))
    q = draw(1, 1, 8, 128, seed=2)
    with torch.no_grad():
        for mask in (tw.causal, tw.window(70_000)):
            got, lse = tw.attention_with_lse(q, k, v, mask=mask, impl="triton_decode")
            want, want_lse = tw.attention_with_lse(q, k, v, mask=mask, impl="reference")
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)
            torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
