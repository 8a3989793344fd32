"""Which tensors operations take: dense ones with memory of their own, of any size, with any number in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor

import tilewise as tw
from tests.ops.transforms import CASES
from tilewise.core.errors import InputError
from tilewise.quant import decode, encode, encode_by_channel

# tensors without memory of their own ---------------------------------------------------------------------------------

K = torch.randn(6, 2, 16)
POOL = torch.zeros(3, 4, 2, 16)
TABLE = torch.tensor([[0]], dtype=torch.int32)
LENGTH = torch.tensor([2], dtype=torch.int32)
ENDS = torch.tensor([0, 6], dtype=torch.int32)
SLOTS = torch.arange(6)
NUMBERS = ONE = torch.tensor([0, 1], dtype=torch.int32)
ANGLES = dict(zip(("cos", "sin"), tw.rope_tables(16, 8), strict=True)) | {"positions": SLOTS}
CODES, CHANNELS = encode(POOL, "int8"), encode_by_channel(POOL, 4)
SUMMED = tw.PageSummaries.of(POOL, POOL)
TAKEN = tw.select_tiles(K[None], K[None], tw.TopK(1))
MADE = tw.quantize_qkv(K[None], K[None], K[None], scheme=tw.Sage2())


def paged(layout: tw.Paged, **more: Any) -> Any:
    return tw.attention(K[None, :1] if layout.cu_seqlens_q is None else K[:1], POOL, POOL, layout=layout, **more)


def dense(**more: Any) -> Any:
    return tw.attention(K[None], K[None], K[None], **more)


def fields(kept: Any, use: Callable[[Any], Any], *names: str) -> dict[str, tuple[Callable[[Any], Any], torch.Tensor]]:
    """For each of the fields a call that has another tensor in it."""
    call = lambda name: lambda t: use(replace(kept, **{name: t}))  # noqa: E731
    return {f"{type(kept).__name__}.{name}": (call(name), getattr(kept, name)) for name in names}


# what else takes tensors: (function of one of them, a good one)
OTHERS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "attention mask": (lambda t: tw.attention(K[None], K[None], K[None], mask=lambda b, h, i, j: t[j] > 0), K[:, 0, 0]),
    "attention paged": (lambda t: tw.attention(K[None, :1], t, POOL, layout=tw.Paged(TABLE, LENGTH)), POOL),
    "attention table": (lambda t: tw.attention(K[None, :1], POOL, POOL, layout=tw.Paged(t, LENGTH)), TABLE),
    "attention lengths": (lambda t: tw.attention(K, K, K, layout=tw.Packed(t)), ENDS),
    "attention quantize": (lambda q: tw.attention(q, K[None], K[None], quantize=tw.Sage2()), K[None]),
    "attention select": (lambda q: tw.attention(q, K[None], K[None], select=tw.TopK(0.5)), K[None]),
    "select_tiles": (lambda q: tw.select_tiles(q, K[None], tw.TopK(0.5)), K[None]),
    "plan": (lambda q: tw.plan(q, K[None], K[None]), K[None]),
    "why": (lambda q: tw.why(q, K[None], K[None]), K[None]),
    "quantize_qkv": (lambda q: tw.quantize_qkv(q, K[None], K[None], scheme=tw.Sage2()), K[None]),
    "kv_write k": (lambda k: tw.kv_write(k, K, POOL.clone(), POOL.clone(), SLOTS), K),
    "kv_write pages": (lambda pages: tw.kv_write(K, K, pages, POOL.clone(), SLOTS), POOL),
    "kv_write slots": (lambda slots: tw.kv_write(K, K, POOL.clone(), POOL.clone(), slots), SLOTS),
    "copy_pages": (lambda pages: tw.copy_pages(pages, POOL.clone(), torch.tensor([[0, 1]])), POOL),
    "summarize_pages": (
        lambda p: tw.summarize_pages(p, POOL, tw.PageSummaries.of(POOL, POOL), tw.Paged(TABLE, LENGTH)), POOL,
    ),
    "rope inplace": (lambda q: tw.rope(q, rope=tw.Rope(*tw.rope_tables(16, 8), SLOTS), inplace=True), K),
    "norm quantize": (lambda x: tw.rms_norm(x, quantize="int8"), K),
    "cross_entropy target": (lambda t: tw.cross_entropy(K[:, 0], t), SLOTS),
    "packed keys": (lambda t: tw.attention(K, K, K, layout=tw.Packed(ENDS, t)), ENDS),
    "packed keys of tiles": (lambda t: tw.select_tiles(K, K, tw.TopK(1), layout=tw.Packed(t)), ENDS),
    "packed keys of codes": (lambda t: tw.quantize_qkv(K, K, K, scheme=tw.Sage2(), layout=tw.Packed(t)), ENDS),
    "paged indptr": (lambda t: paged(tw.Paged((t, NUMBERS), LENGTH)), ONE),
    "paged indices": (lambda t: paged(tw.Paged((ONE, t), LENGTH)), NUMBERS),
    "paged lengths": (lambda t: paged(tw.Paged(TABLE, t)), LENGTH),
    "paged lengths of tiles": (lambda t: paged(tw.Paged(TABLE, t), select=tw.TopK(1)), LENGTH),
    "paged queries": (lambda t: paged(tw.Paged(TABLE, LENGTH, t)), ONE),
    "summaries table": (lambda t: tw.summarize_pages(POOL, POOL, SUMMED, tw.Paged(t, LENGTH)), TABLE),
    "summaries of": (lambda t: tw.PageSummaries.of(t, POOL), POOL),
    "encode": (lambda t: encode(t, "int8"), POOL),
    "encode_by_channel": (lambda t: encode_by_channel(t, 4), POOL),
    "ByChannel.keys": (CHANNELS.keys, torch.tensor([0])),
    "document": (lambda t: dense(mask=tw.document(t)), ENDS.new_zeros(6)),
    "explicit": (lambda t: dense(mask=tw.explicit(t)), torch.ones(6, 6, dtype=torch.bool)),
    "bias": (lambda t: dense(score=tw.bias(t)), K.new_ones(6, 6)),
    **fields(SUMMED, lambda s: paged(tw.Paged(TABLE, LENGTH, summaries=s), select=tw.TopPages(2)), "least", "v_mean"),
    **fields(CODES, decode, "data", "scale"),
    **fields(CHANNELS, lambda k: k, "data", "scale", "least", "open", "place"),
    **fields(tw.Rope(**ANGLES), lambda rope: tw.rope(K, rope=rope), *ANGLES),
    **fields(TAKEN, lambda tiles: dense(select=tiles), "kept", "classes"),
    **fields(MADE, lambda codes: dense(quantize=codes), "q", "k_scale", "v_scale", "k_mean"),
}  # fmt: skip
CALLS = [(name, n) for name, case in CASES.items() for n in range(len(case.shapes))]
BY_NAME = {f"{name} {n}": (name, n) for name, n in CALLS}


class Wrapper(torch.Tensor):
    """A subclass whose memory is that of the tensor it wraps."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device, strides=x.stride())
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran on a wrapper")


class Named(torch.Tensor):
    """A subclass with memory of its own."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def refused(run: Callable[[], Any], kind: str, hint: str) -> None:
    with pytest.raises(InputError, match=rf"got a {kind}.*{hint}"):
        run()


def called(name: str, made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """A call whose tensor is `made` of a good one."""
    if name in OTHERS:
        run, x = OTHERS[name]
        run(x.clone())  # what a good call leaves behind must not let the other pass
        return lambda: run(made(x))
    operation, n = BY_NAME[name]
    inputs = list(CASES[operation].inputs(torch.float32))
    CASES[operation].run(*inputs)
    inputs[n] = made(inputs[n])
    return lambda: CASES[operation].run(*inputs)


ALL = pytest.mark.parametrize("name", [*BY_NAME, *OTHERS])


@ALL
def test_distributed_tensors_are_refused(name: str, mesh: Any) -> None:
    made = lambda x: torch.distributed.tensor.distribute_tensor(x, mesh)  # noqa: E731
    refused(called(name, made), "DTensor", "to_local")


@ALL
def test_wrappers_are_refused_before_anything_runs(name: str) -> None:
    refused(called(name, Wrapper), "Wrapper", "pass the tensor that it wraps")


@ALL
def test_sparse_tensors_are_refused(name: str) -> None:
    refused(called(name, torch.Tensor.to_sparse), "torch.sparse_coo tensor", "to_dense")


@pytest.mark.parametrize("name", [name for name in [*BY_NAME, *OTHERS] if "slots" not in name])
def test_tensors_that_are_negated_when_read_are_refused(name: str) -> None:
    made = lambda x: torch._neg_view(x)  # noqa: E731  # as the imaginary part of a conjugate is
    refused(called(name, made), "tensor that is negated", "resolve_neg")


@ALL
def test_nested_tensors_are_refused(name: str) -> None:
    refused(called(name, lambda x: torch.nested.nested_tensor([x])), "nested tensor", "Packed")


@ALL
def test_subclasses_with_memory_run(name: str) -> None:
    called(name, lambda x: x.clone().as_subclass(Named))()


def test_a_gradient_that_is_negated_when_read() -> None:
    x = torch.randn(1, 20, 2, 8, requires_grad=True)
    for run in (lambda x: tw.attention(x, x, x), tw.rms_norm, lambda x: tw.swiglu(x, x)):
        do = torch.randn(x.shape)
        found, expected = (torch.autograd.grad(run(x), x, g)[0] for g in (torch._neg_view(-do), do))
        torch.testing.assert_close(found, expected)


# sizes of 0 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "select", "far", "quantize", "both"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 0, 64), (0, 3, 64), (2, 3, 0), (0, 0, 0), (2, 0, 0)])
@pytest.mark.parametrize("layout", ["dense", "packed", "paged", "paged packed"])
def test_empty_attention(how: str, batch: int, queries: int, keys: int, layout: str) -> None:
    more: dict[str, Any] = {
        "plain": {},
        "select": {"select": tw.TopK(0.5)},
        "far": {"select": tw.Select(tw.TopK(0.5), far="summary")},
        "quantize": {"quantize": tw.Sage2()},
        "both": {"select": tw.TopK(0.5), "quantize": tw.Sage2()},
    }[how]
    q, k = torch.randn(batch, queries, 2, 16), torch.randn(batch, keys, 2, 16)
    starts, ends = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (queries, keys))
    if layout.startswith("paged"):
        k = torch.randn(4, 64, 2, 16)
        cu = starts if layout == "paged packed" else None
        table, lengths = torch.zeros(batch, 1, dtype=torch.int32), torch.full((batch,), keys, dtype=torch.int32)
        more |= {"layout": tw.Paged(table, lengths, cu)}
    elif layout == "packed":
        k, more = k.flatten(0, 1), more | {"layout": tw.Packed(starts, ends)}
    if layout.endswith("packed"):
        q = q.flatten(0, 1)
    o, lse = tw.attention_with_lse(q, k, k, **more)
    assert o.shape == q.shape
    assert lse.shape == (*q.shape[:-3], 2, q.shape[-3])
    if not keys:
        assert (o == 0.0).all()
        assert (lse == -torch.inf).all()


# infinities and NaN --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [16, 20, 40])
def test_what_is_no_number_gives_what_the_reference_gives(
    dtype: torch.dtype, where: str, value: float, causal: bool, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = {name: torch.randn(1, rows, 2, 16, generator=generator).to(dtype) for name in "qkv"}
    inputs[where][:, 3, 0, 5] = value
    found = {}
    for impl in ("cpu_sdpa", "cpu_tiled", "reference"):
        x = [a.clone().requires_grad_() for a in inputs.values()]
        o, lse = tw.attention_with_lse(*x, mask=tw.causal if causal else None, impl=impl)
        (dq, _, _) = torch.autograd.grad(o, x, torch.ones_like(o))
        found[impl] = (o.detach(), lse.detach(), dq.isfinite())
    for impl in ("cpu_sdpa", "cpu_tiled"):
        for ours, theirs in zip(found[impl], found["reference"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2, equal_nan=True)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("row", [3, 140])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("mask", [None, tw.causal, tw.window(5), tw.document(torch.arange(150) // 80)], ids=repr)
def test_what_is_no_number_reaches_whatever_it_meets(where: str, row: int, value: float, mask: tw.Mask | None) -> None:
    """Each output and gradient that is no number where PyTorch has, for every query, the keys alone that it sees."""
    generator = torch.Generator().manual_seed(row)
    inputs = {name: torch.randn(1, 150, 1, 8, generator=generator) for name in "qkv"}
    inputs[where][0, row, 0, 5] = value
    places = {"b": torch.tensor(0), "h": torch.tensor(0), "i": torch.arange(150)[:, None], "j": torch.arange(150)}
    seen = torch.ones(150, 150, dtype=torch.bool) if mask is None else mask.evaluate(**places).expand(150, 150)
    do = torch.linspace(0.5, 2.0, 150).view(1, -1, 1, 1)
    x = [a.requires_grad_() for a in inputs.values()]
    q, k, v = (a[0, :, 0] for a in x)
    each = [(k[see] @ q[i] * 8**-0.5).softmax(0) @ v[see] for i, see in enumerate(seen)]
    o = torch.stack(each)[None, :, None]
    expected = [o, *torch.autograd.grad(o, x, do.expand_as(o))]
    for impl in ("cpu_sdpa", "cpu_tiled", "reference"):
        o = tw.attention(*x, mask=mask, impl=impl if mask in (None, tw.causal) or impl != "cpu_sdpa" else None)
        for found, exact in zip((o, *torch.autograd.grad(o, x, do.expand_as(o))), expected, strict=True):
            assert not found[~exact.isfinite()].isfinite().any(), impl
            both = found.isfinite() & exact.isfinite()
            torch.testing.assert_close(found[both], exact[both], rtol=1e-4, atol=1e-4)
