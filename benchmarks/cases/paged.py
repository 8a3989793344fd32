"""Questions `decode` and `prefill_paged`: keys and values in pages, bf16, 32 heads on 8 of 128.

Decoding, one new token for each request: 16 x 8k, 64 x 4k, 128 x 1k and 1 x 128k tokens, of equal, uniform and Zipf
lengths, in pages of 16 and of 1. Contenders: our paged rows, with plan and merge; cuDNN through SDPA over contiguous
keys of equal length, the most that a paged one could reach; FlashInfer's decode over the same pages where `flashinfer`
imports (its plan, made on the host, is not in its time). Each is replayed from a CUDA graph where there is a GPU,
FlashInfer called. GB/s count the keys and values of all tokens once.

Causal prefill of whole requests: 16 x 1k, 4 x 4k, 1 x 16k tokens and 16 of Zipf lengths, in pages of 16 and of 1.
Contenders: our rows over pages, the Hopper row over the same tokens packed, FlashInfer's prefill. TFLOP/s count visible
pairs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.cases.exact_grid import zipf_lengths
from benchmarks.contenders import SDPA_BACKENDS, sdpa, sources_of, tilewise
from benchmarks.environment import current, version
from benchmarks.records import Writer
from benchmarks.reference import relative_error
from benchmarks.timing import ceilings, failure_message, graphed, interleaved, method
from tilewise.quant import Encoded, decode

DECODE, PREFILL = "decode", "prefill_paged"
INCLUDES = "one step: plan, attention and merge, replayed from a CUDA graph"
OTHERS = "one call, its plan made beforehand"
WHOLE = "one call"
ROUNDS = 30


@dataclass(frozen=True)
class Batch:
    """Requests of these lengths, in pages of `page_size`; `mix` is how the lengths were drawn.

    The first `shared` tokens of all requests lie in the same pages, whole ones.
    """

    lengths: tuple[int, ...]
    mix: str
    page_size: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    shared: int = 0

    @property
    def distinct(self) -> int:
        """Tokens that lie somewhere: shared ones count once."""
        return self.shared + sum(self.lengths) - self.shared * len(self.lengths)

    @property
    def problem(self) -> dict[str, Any]:
        """What the record says."""
        return {
            "part": f"{self.mix}, page {self.page_size}", "batch": len(self.lengths), "tokens": sum(self.lengths),
            "lengths": self.mix, "page_size": self.page_size, "seqlen_q": 1, "num_heads_q": self.heads_q,
            "num_heads_kv": self.heads_kv, "head_dim": self.head_dim,
        }  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """Queries (batch, 1, heads, dim), a pool (pages, 2, page_size, heads, dim) of keys and values, and the layout."""

    q: torch.Tensor
    pool: torch.Tensor
    layout: tw.Paged


def lengths_of(batch: int, mean: int, mix: str) -> tuple[int, ...]:
    """`batch` lengths whose mean is `mean`: equal, uniform from 1 to twice that, or as 1, 1/2, 1/3, ..."""
    if mix == "equal":
        return (mean,) * batch
    if mix == "zipf":
        return zipf_lengths(batch, batch * mean)
    drawn = torch.randint(1, 2 * mean, (batch,), generator=torch.Generator().manual_seed(1))
    return tuple(drawn.tolist())


def batches(quick: bool) -> list[Batch]:
    """All problems, in the order of the table."""
    sizes = ((16, 8192), (64, 4096), (128, 1024), (1, 131_072)) if not quick else ((4, 40), (1, 100))
    heads = {} if not quick else {"heads_q": 4, "heads_kv": 2, "head_dim": 16}
    return [
        Batch(lengths_of(batch, mean, mix), mix, page_size, **heads)
        for page_size in (16, 1)
        for mix in ("equal", "uniform", "zipf")
        for batch, mean in sizes
        if batch > 1 or mix == "equal"
    ]


def tensors(batch: Batch, dtype: torch.dtype, device: str) -> Tensors:
    """Random keys, values and queries; pages in no order."""
    generator = torch.Generator(device).manual_seed(0)
    shared = batch.shared // batch.page_size
    counts = [-(-n // batch.page_size) - shared for n in batch.lengths]
    shape = (shared + sum(counts), 2, batch.page_size, batch.heads_kv, batch.head_dim)
    pool = torch.randn(shape, generator=generator, device=device).to(dtype)
    q = torch.randn(len(counts), 1, batch.heads_q, batch.head_dim, generator=generator, device=device).to(dtype)
    numbers = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0)).to(torch.int32)
    pages = [torch.cat([numbers[:shared], own]) for own in numbers[shared:].split(counts)]
    table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True).to(device)
    return Tensors(q, pool, tw.Paged(table, torch.tensor(batch.lengths, dtype=torch.int32, device=device)))


def contenders(batch: Batch, given: Tensors, flashinfer: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Who decodes this batch; each gives o (batch, 1, heads, dim)."""
    q, pool, layout = given.q, given.pool, given.layout
    device = q.device.type
    k, v = pool[:, 0], pool[:, 1]
    found = {
        f"tilewise.{row}": graphed(lambda row=row: tw.attention(q, k, v, layout=layout, impl=row), device)  # type: ignore[misc]
        for row in (("hopper_decode", "triton_paged") if device == "cuda" else ("cpu_tiled",))
    }
    if batch.mix == "equal":
        shape = (2, len(batch.lengths), batch.lengths[0], *pool.shape[3:])
        dense = torch.randn(shape, device=q.device).to(q.dtype)
        for name, backend in SDPA_BACKENDS[device].items():
            if name != "fa2":
                call = sdpa(backend, False)
                found[f"{name}.contiguous"] = graphed(lambda call=call: call(q, dense[0], dense[1]), device)  # type: ignore[misc]
        for row in ("hopper_decode", "triton_decode") if device == "cuda" else ():
            call = tilewise(row)
            found[f"tilewise.{row}.contiguous"] = graphed(lambda call=call: call(q, dense[0], dense[1]), device)  # type: ignore[misc]
    if flashinfer is not None:
        found["flashinfer"] = _flashinfer(flashinfer, batch, given)
    return found


def _flashinfer(module: Any, batch: Batch, given: Tensors) -> Callable[[], torch.Tensor]:
    wrapper, plan = flashinfer_decode(module, batch, given)
    plan()
    return lambda: wrapper.run(given.q[:, 0], given.pool)[:, None]


def flashinfer_decode(module: Any, batch: Batch, given: Tensors) -> tuple[Any, Callable[[], object]]:
    """FlashInfer's wrapper for one token of each request, and its plan. What the plan reads on the host lies there."""
    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device=given.q.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr, indices, last = _pages(batch, given)
    pages = (indptr.cpu(), indices, last.cpu())
    return wrapper, lambda: wrapper.plan(
        *pages, batch.heads_q, batch.heads_kv, batch.head_dim, batch.page_size,
        q_data_type=given.q.dtype, kv_data_type=given.q.dtype,
    )  # fmt: skip


def rows_of(
    batch: Batch, given: Tensors, request: int, codes: tuple[Encoded, Encoded] | None = None
) -> tuple[torch.Tensor, ...]:
    """Keys and values of one request, (tokens, heads, dim); with `codes` of all pages, what these stand for."""
    assert isinstance(given.layout.block_table, torch.Tensor)
    length = batch.lengths[request]
    pages = given.layout.block_table[request, : -(-length // batch.page_size)].long()
    if codes is None:
        parts = given.pool[pages].unbind(1)
    else:
        parts = tuple(decode(Encoded(x.data[pages], x.scale[pages])) for x in codes)
    return tuple(x.flatten(0, 1)[:length] for x in parts)


def reference(batch: Batch, given: Tensors, request: int, codes: tuple[Encoded, Encoded] | None = None) -> torch.Tensor:
    """o of one request in float64, (heads, dim); `codes` as for `rows_of`."""
    k, v = (x.double() for x in rows_of(batch, given, request, codes))
    q = given.q[request, 0].double().view(batch.heads_kv, -1, batch.head_dim)
    p = torch.einsum("hgd,nhd->hgn", q, k).mul(batch.head_dim**-0.5).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", p, v).flatten(0, 1)


def find_flashinfer(device: str) -> tuple[Any, str]:
    """FlashInfer, or None, and for the record its version or why it is missing."""
    if device != "cuda":
        return None, f"flashinfer left out: no kernels for {device}"
    try:
        return importlib.import_module("flashinfer"), f"flashinfer is flashinfer-python {version('flashinfer-python')}"
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and str(error.name).startswith("flashinfer")
        return None, f"flashinfer left out: {'not installed' if absent else failure_message(error)}"


def run(options: Options) -> None:
    """Measure every batch; one record per contender and batch. Parts: the mixes of lengths, and "prefill"."""
    device, rounds = options.device, min(options.rounds, ROUNDS)
    flashinfer, says = find_flashinfer(device)
    print(says, flush=True)
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    writer = Writer(current(device), method=f"{method(device, rounds)}; {says}", ceilings=ceiling, results=options.out)
    with torch.no_grad():
        for batch in batches(options.quick):
            if options.wants(batch.mix):
                _decode(batch, device, flashinfer, writer, rounds)
        if options.wants("prefill"):
            for batch in prefills(options.quick):
                _prefill(batch, device, flashinfer, writer, rounds)


def _decode(batch: Batch, device: str, flashinfer: Any, writer: Writer, rounds: int) -> None:
    given = tensors(batch, dtype_of(device), device)
    request = min(3, len(batch.lengths) - 1)
    want = reference(batch, given, request)
    found = contenders(batch, given, flashinfer)
    timed = interleaved(found, device=device, rounds=rounds)
    read = 2 * sum(batch.lengths) * batch.heads_kv * batch.head_dim * given.q.element_size()
    for name, call in found.items():
        times = timed[name].quantiles
        error: dict[str, Any] | None = {"metric": "failure", "message": timed[name].failure}
        if times:
            value = relative_error(call()[request, 0], want) if ".contiguous" not in name else None
            error = None if value is None else {"metric": "relative l2 to float64, one request", "value": value}
        writer.write(
            DECODE, batch.problem | {"dtype": str(given.q.dtype).removeprefix("torch.")}, name, times_ms=times,
            gbps=read / times[1] / 1e6 if times else None, error=error,
            includes=OTHERS if name == "flashinfer" else INCLUDES, sources=sources_of(name),
        )  # fmt: skip


def prefills(quick: bool) -> list[Batch]:
    """Requests of which every token is new."""
    sizes = (((1024,) * 16, "equal"), ((4096,) * 4, "equal"), ((16_384,), "equal"), (zipf_lengths(16, 16_384), "zipf"))
    if quick:
        sizes = (((40,) * 2, "equal"), ((30, 60), "equal"), ((70,), "equal"), (zipf_lengths(3, 90), "zipf"))
    heads = {} if not quick else {"heads_q": 4, "heads_kv": 2, "head_dim": 16}
    return [Batch(lengths, mix, page_size, **heads) for page_size in (16, 1) for lengths, mix in sizes]


def _prefill(batch: Batch, device: str, flashinfer: Any, writer: Writer, rounds: int) -> None:
    given = tensors(batch, dtype_of(device), device)
    total = sum(batch.lengths)
    generator = torch.Generator(device).manual_seed(1)
    q = torch.randn(total, batch.heads_q, batch.head_dim, generator=generator, device=device).to(given.q.dtype)
    cu_seqlens = torch.tensor([0, *batch.lengths]).cumsum(0).to(device, torch.int32)
    layout = tw.Paged(given.layout.block_table, given.layout.seqlens_k, cu_seqlens)
    pool_k, pool_v = given.pool[:, 0], given.pool[:, 1]
    k, v = (torch.cat(x) for x in zip(*(rows_of(batch, given, r) for r in range(len(batch.lengths))), strict=True))

    def over_pages(row: str) -> Callable[[], torch.Tensor]:
        return lambda: tw.attention(q, pool_k, pool_v, mask=tw.causal, layout=layout, impl=row)

    rows = ("hopper", "triton_paged") if device == "cuda" else ("cpu_tiled",)
    contiguous = rows[0]
    found = {f"tilewise.{row}": over_pages(row) for row in rows}
    packed = tw.Packed(cu_seqlens)
    found[f"tilewise.{contiguous}.packed"] = lambda: tw.attention(
        q, k, v, mask=tw.causal, layout=packed, impl=contiguous
    )
    if flashinfer is not None:
        found["flashinfer"] = _flashinfer_prefill(flashinfer, batch, given, q, cu_seqlens)
    last = len(batch.lengths) - 1
    rows_of_last = slice(total - batch.lengths[last], total)
    want = causal_head(q[rows_of_last, 0], k[rows_of_last, 0], v[rows_of_last, 0])
    timed = interleaved(found, device=device, rounds=rounds)
    pairs = sum(n * (n + 1) // 2 for n in batch.lengths)
    for name, call in found.items():
        times = timed[name].quantiles
        error = {"metric": "failure", "message": timed[name].failure}
        if times:
            value = relative_error(call()[rows_of_last, 0], want)
            error = {"metric": "relative l2 to float64, one head of one request", "value": value}
        writer.write(
            PREFILL, batch.problem | {"seqlen_q": "all", "causal": True, "dtype": str(q.dtype).removeprefix("torch.")},
            name, times_ms=times, tflops=4 * batch.head_dim * batch.heads_q * pairs / times[1] / 1e9 if times else None,
            error=error, includes=OTHERS if name == "flashinfer" else WHOLE, sources=sources_of(name),
        )  # fmt: skip


def dtype_of(device: str) -> torch.dtype:
    """Of queries, and of keys that are not encoded."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def causal_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head of one request in float64, a block of rows at a time."""
    blocks = []
    for start in range(0, len(q), 1024):
        rows = q[start : start + 1024].double()
        s = rows @ k.double().T * q.shape[-1] ** -0.5
        i = torch.arange(start, start + len(rows), device=q.device)[:, None]
        hidden = torch.arange(len(k), device=q.device) > i
        blocks.append(s.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double())
    return torch.cat(blocks)


def _flashinfer_prefill(
    module: Any, batch: Batch, given: Tensors, q: torch.Tensor, cu_seqlens: torch.Tensor
) -> Callable[[], torch.Tensor]:
    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
    wrapper.plan(
        cu_seqlens, *_pages(batch, given), batch.heads_q, batch.heads_kv, batch.head_dim, batch.page_size, causal=True,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, given.pool)


def _pages(batch: Batch, given: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr, indices, tokens of the last page), as FlashInfer takes them."""
    device = given.q.device
    lengths = torch.tensor(batch.lengths)
    counts = -(-lengths // batch.page_size)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(device, torch.int32)
    assert isinstance(given.layout.block_table, torch.Tensor)
    indices = torch.cat([row[:n] for row, n in zip(given.layout.block_table, counts.tolist(), strict=True)])
    return indptr, indices, ((lengths - 1) % batch.page_size + 1).to(device, torch.int32)
