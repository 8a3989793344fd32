"""Rows further apart than 32 bits count: no kernel multiplies a row and its stride in fewer."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw

WIDTH, ROWS = 64, 2
FAR = 2**31 + 8  # numbers from a row to the next


def far(x: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """A copy that lies far apart along an axis, in memory of which only what is written takes any."""
    strides = [FAR if n == axis else stride for n, stride in enumerate(x.contiguous().stride())]
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 has no name
    memory = mmap.mmap(-1, size * x.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.float16)


Call = Callable[[torch.Tensor], torch.Tensor]
CALLS: dict[str, Call] = {
    "rms_norm": lambda x: tw.rms_norm(x, impl="triton"),
    "rms_norm, residual": lambda x: tw.rms_norm(rows(1), residual=x, impl="triton")[0],
    "layer_norm": lambda x: tw.layer_norm(x, impl="triton"),
    "softmax": lambda x: tw.softmax(x, impl="triton"),
    "swiglu, gate": lambda x: tw.swiglu(x, rows(1), impl="triton"),
    "swiglu, up": lambda x: tw.swiglu(rows(1), x, impl="triton"),
    "cross_entropy": lambda x: tw.cross_entropy(x, torch.tensor([3, 5]), impl="triton"),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward(name: str) -> None:
    x = rows()
    assert torch.equal(CALLS[name](far(x)), CALLS[name](x))


@pytest.mark.parametrize("name", CALLS)
def test_gradients(name: str) -> None:
    """Of rows far apart, and of incoming gradients that are."""
    near = rows().requires_grad_()
    apart = far(rows()).requires_grad_()
    outputs = [CALLS[name](x) for x in (near, apart)]
    do = torch.ones_like(outputs[0]) if outputs[0].ndim == 0 else rows(2)
    want = torch.autograd.grad(outputs[0], near, do)[0]
    found = torch.autograd.grad(outputs[1], apart, do if do.ndim == 0 else far(do))[0]
    assert torch.equal(found, want)


def test_tokens_of_a_sequence() -> None:
    x = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    rope = tw.Rope(torch.ones(4, 16), torch.ones(4, 16), torch.arange(2))
    assert torch.equal(tw.rope(far(x), rope=rope, impl="triton"), tw.rope(x, rope=rope, impl="triton"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(torch.float16)


def same(call: Callable[..., Any], tensors: dict[str, torch.Tensor], name: str, axis: int) -> None:
    """That a tensor far apart along an axis gives the bits of one that is not."""
    want = call(**tensors)
    found = call(**{**tensors, name: far(tensors[name], axis)})
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_attention(name: str, axis: int) -> None:
    """Along batch, tokens and heads, forward and backward."""
    tensors = {"q": numbers(3, 3, 4, 16), "k": numbers(3, 3, 2, 16, seed=1), "v": numbers(3, 3, 2, 16, seed=2)}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = tw.attention(*leaves, mask=tw.causal, impl="triton")
        return o, *torch.autograd.grad(o, leaves, do)

    same(call, {**tensors, "do": numbers(3, 3, 4, 16, seed=3)}, name, axis)


@pytest.mark.parametrize(("name", "axis"), [("q", 0), ("q", 1), ("q", 2), ("k", 0), ("k", 2), ("v", 0), ("v", 2)])
def test_few_queries(name: str, axis: int) -> None:
    """Keys whose rows are so far apart have other implementations."""
    tensors = {"q": numbers(3, 3, 4, 16), "k": numbers(3, 40, 2, 16), "v": numbers(3, 40, 2, 16, seed=2)}
    same(lambda **x: tw.attention_with_lse(*x.values(), impl="triton_decode"), tensors, name, axis)


LAYOUT = tw.Paged(torch.tensor([[2, 0], [1, 2]], dtype=torch.int32), torch.tensor([7, 6], dtype=torch.int32))


@pytest.mark.parametrize(("name", "axis"), [("q", 0), ("q", 2), ("k", 0), ("v", 0)])
def test_pages(name: str, axis: int) -> None:
    tensors = {"q": numbers(2, 2, 3, 16), "k": numbers(3, 4, 3, 16, seed=1), "v": numbers(3, 4, 3, 16, seed=2)}
    same(lambda **x: tw.attention_with_lse(*x.values(), layout=LAYOUT, impl="triton_paged"), tensors, name, axis)


@pytest.mark.parametrize(("name", "axis"), [("k", 0), ("k", 1), ("v", 0), ("pages", 0), ("pages", 1), ("pages", 2)])
def test_writing_pages(name: str, axis: int) -> None:
    slots = torch.tensor([0, 9, 3])

    def call(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        other = torch.zeros(3, 4, 3, 16, dtype=torch.float16)
        tw.kv_write(k, v, pages, other, slots, impl="triton")
        tw.copy_pages(pages, other, torch.tensor([[0, 1]]), impl="triton")
        return pages, other

    zeros = torch.zeros(3, 4, 3, 16, dtype=torch.float16)
    same(call, {"k": numbers(3, 3, 16), "v": numbers(3, 3, 16, seed=1), "pages": zeros}, name, axis)


@pytest.mark.parametrize(("name", "axis"), [("o", 0), ("o", 1), ("o", 2), ("lse", 0), ("lse", 1)])
def test_states(name: str, axis: int) -> None:
    tensors = {"o": numbers(3, 3, 3, 16), "lse": numbers(3, 3, 3).float()}
    other = [x.clone() for x in tensors.values()]
    same(lambda o, lse: tw.merge((o, lse), (other[0], other[1]), impl="triton"), tensors, name, axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_codes(name: str, axis: int) -> None:
    tensors = {"q": numbers(3, 3, 3, 16), "k": numbers(3, 3, 3, 16, seed=1), "v": numbers(3, 3, 3, 16, seed=2)}

    def call(**x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = tw.quantize_qkv(*x.values(), scheme=tw.Sage2(), impl="triton")
        return made.q, made.k, made.v

    same(call, tensors, name, axis)
