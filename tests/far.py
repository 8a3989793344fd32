"""Tensors further apart along a dimension than 32 bits count, and calls that must give the bits of near ones."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.ops.linear import linear

FAR = 2**31 + 8  # numbers from one to the next
WIDTH = 64


def far(x: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """A copy that lies far apart along an axis; on a CPU in memory of which only what is written takes any."""
    strides = [FAR if n == axis else stride for n, stride in enumerate(x.contiguous().stride())]
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    if x.is_cuda:
        return torch.empty(size, dtype=x.dtype, device=x.device).as_strided(x.shape, strides).copy_(x)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 has no name
    memory = mmap.mmap(-1, size * x.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def numbers(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same each time."""
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return found.to(device, torch.float16)


Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, Callable[..., tuple[torch.Tensor, ...]]]
Make = Callable[[str, str | None, int], Made]  # of a device, an implementation and a head dimension
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {  # of rows
    "rms_norm": lambda x, y, impl: tw.rms_norm(x, impl=impl),
    "rms_norm, residual": lambda x, y, impl: tw.rms_norm(y, residual=x, impl=impl)[0],
    "layer_norm": lambda x, y, impl: tw.layer_norm(x, impl=impl),
    "softmax": lambda x, y, impl: tw.softmax(x, impl=impl),
    "swiglu, gate": lambda x, y, impl: tw.swiglu(x, y, impl=impl),
    "swiglu, up": lambda x, y, impl: tw.swiglu(y, x, impl=impl),
    "cross_entropy": lambda x, y, impl: tw.cross_entropy(x, torch.tensor([3, 5], device=x.device), impl=impl),
}


def of_rows(operation: str) -> Make:
    """An operation on rows, forward and backward."""

    def make(device: str, impl: str | None, dim: int) -> Made:
        x, y, do = (numbers(2, WIDTH, device=device, seed=n) for n in range(3))

        def call(x: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
            leaf = x.detach().requires_grad_()
            o = OPERATIONS[operation](leaf, y, impl)
            return o.detach(), torch.autograd.grad(o, leaf, do if o.ndim else torch.ones_like(o))[0]

        return {"x": x, "do": do}, call

    return make


def _qkv(device: str, dim: int, rows_q: int = 3, rows_k: int = 3) -> Tensors:
    q = numbers(3, rows_q, 4, dim, device=device)
    k, v = (numbers(3, rows_k, 2, dim, device=device, seed=n) for n in (1, 2))
    return {"q": q, "k": k, "v": v}


def _attention(device: str, impl: str | None, dim: int) -> Made:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = tw.attention(*leaves, mask=tw.causal, impl=impl, deterministic=True)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    return _qkv(device, dim) | {"do": numbers(3, 3, 4, dim, device=device, seed=3)}, call


def _few_queries(device: str, impl: str | None, dim: int) -> Made:
    impl = impl and "triton_decode"
    return _qkv(device, dim, 3, 40), lambda **x: tw.attention_with_lse(*x.values(), impl=impl)


def _few_bits(device: str, impl: str | None, dim: int) -> Made:
    impl = impl and "triton_codes"
    return _qkv(device, dim), lambda **x: tw.attention_with_lse(*x.values(), quantize=tw.Sage2(), impl=impl)


def _pages(device: str, impl: str | None, dim: int) -> Made:
    impl = impl and "triton_paged"
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 0], [1, 2]], [7, 6]))
    k, v = (numbers(3, 4, 2, dim, device=device, seed=n) for n in (1, 2))
    tensors = {"q": numbers(2, 2, 4, dim, device=device), "k": k, "v": v}
    return tensors, lambda **x: tw.attention_with_lse(*x.values(), layout=tw.Paged(table, lengths), impl=impl)


def _written(device: str, impl: str | None, dim: int) -> Made:
    slots, pairs = torch.tensor([0, 9, 3], device=device), torch.tensor([[0, 1]], device=device)

    def call(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        other = torch.zeros(3, 4, 3, dim, dtype=k.dtype, device=device)
        tw.kv_write(k, v, pages, other, slots, impl=impl)
        tw.copy_pages(pages, other, pairs, impl=impl)
        return pages.clone(), other

    k, v = (numbers(3, 3, dim, device=device, seed=n) for n in (1, 2))
    return {"k": k, "v": v, "pages": torch.zeros(3, 4, 3, dim, dtype=k.dtype, device=device)}, call


def _states(device: str, impl: str | None, dim: int) -> Made:
    tensors = {"o": numbers(3, 3, 3, dim, device=device), "lse": numbers(3, 3, 3, device=device).float()}
    o, lse = (x.clone() for x in tensors.values())
    return tensors, lambda **x: tw.merge((x["o"], x["lse"]), (o, lse), impl=impl)


def _codes(device: str, impl: str | None, dim: int) -> Made:
    def call(**x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = tw.quantize_qkv(*x.values(), scheme=tw.Sage2(), impl=impl)
        return made.q, made.k, made.v

    return _qkv(device, dim), call


def _rotated(device: str, impl: str | None, dim: int) -> Made:
    table = torch.ones(4, dim // 2, device=device)
    rope = tw.Rope(table, table, torch.arange(2, device=device))
    return {"x": numbers(2, 2, dim, device=device)}, lambda x: (tw.rope(x, rope=rope, impl=impl),)


def _layer(device: str, impl: str | None, dim: int) -> Made:
    tensors = {"x": numbers(2, dim, device=device), "weight": numbers(3, dim, device=device)}
    return tensors, lambda **x: (linear(*x.values(), impl=impl),)


MAKERS: dict[str, Make] = {
    **{name: of_rows(name) for name in OPERATIONS},
    "attention": _attention,
    "attention, few queries": _few_queries,
    "attention, few bits": _few_bits,
    "attention, pages": _pages,
    "kv_write": _written,
    "linear": _layer,
    "merge": _states,
    "quantize": _codes,
    "rope": _rotated,
}
_AXES: dict[str, dict[str, tuple[int, ...]]] = {
    **{name: {"x": (0,), "do": (0,)} for name in OPERATIONS if name != "cross_entropy"},
    "cross_entropy": {"x": (0,)},
    "attention": dict.fromkeys(("q", "k", "v", "do"), (0, 1, 2)),
    # keys whose rows are so far apart have other implementations
    "attention, few queries": {"q": (0, 1, 2), "k": (0, 2), "v": (0, 2)},
    "attention, few bits": dict.fromkeys(("q", "k", "v"), (0, 1, 2)),
    "attention, pages": {"q": (0, 2), "k": (0,), "v": (0,)},
    "kv_write": {"k": (0, 1), "v": (0,), "pages": (0, 1, 2)},
    "linear": {"x": (0,), "weight": (0,)},
    "merge": {"o": (0, 1, 2), "lse": (0, 1)},
    "quantize": dict.fromkeys(("q", "k", "v"), (0, 1, 2)),
    "rope": {"x": (0, 1)},
}
CASES = [
    pytest.param(name, tensor, axis, id=f"{name}, {tensor} {axis}")
    for name, tensors in _AXES.items()
    for tensor, axes in tensors.items()
    for axis in axes
]


def check(name: str, tensor: str, axis: int, device: str, impl: str | None, dim: int) -> None:
    """That a tensor far apart along an axis gives the numbers of one that is not."""
    tensors, call = MAKERS[name](device, impl, dim)
    apart: Any = {**tensors, tensor: far(tensors[tensor], axis)}
    want = call(**{name: x.clone() for name, x in tensors.items()})
    for found, x in zip(call(**apart), want, strict=True):
        if device == "cpu":
            assert torch.equal(found, x), f"{name}: {tensor}, far apart along {axis}"
        else:  # whose implementation may be another, for sums in another order
            torch.testing.assert_close(found.float(), x.float(), rtol=2.0**-9, atol=2.0**-9)
