"""Question `selected_pages`: decoding over the pages, or tokens, of a KV cache that matter, beside all of them.

bf16, one new token for each request: 1 x 128k and 16 x 32k tokens, an eighth of them read, 32 heads of 128. Eight heads
of keys in pages of 16 and of 64; and 32, one for each head of queries, as the models have for which SparQ was made, in
pages of 64 and of 256, where a dimension's codes lie side by side for more tokens. Keys and values of a page lie around
a centre of its own, and a query around that of one page's keys.
Contenders: our kernels over all pages; `TopPages` by ends and by means of keys, and with a key for each page that is
not read; `SparQ` by 32 dimensions in codes of 8 bits and of 4, the latter also by 16 dimensions and with a 16th of the
tokens, which reads less than an eighth of the bytes of all; cuDNN through SDPA over contiguous keys. Each is replayed
from a CUDA graph where there is a GPU. GB/s count the keys and values of all tokens once; errors are to attention over
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.cases.paged import Batch, Tensors, dtype_of, reference, tensors
from benchmarks.contenders import SDPA_BACKENDS, sdpa, sources_of
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import relative_error
from benchmarks.timing import ceilings, graphed, interleaved, method

QUESTION = "selected_pages"
ROUNDS = 30
SHARE = 8  # one part of so many is read
RANK = 32


def run(options: Options) -> None:
    """Measure every batch; one record per contender and batch. Parts: "page 16", "page 64", "own heads" and "long
    pages".
    """
    device, rounds = options.device, min(options.rounds, ROUNDS)
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    writer = Writer(current(device), method=method(device, rounds), ceilings=ceiling, results=options.out)
    sizes = ((1, 131_072), (16, 32_768)) if not options.quick else ((1, 200), (3, 64))
    few, many, most = (16, 64, 256) if not options.quick else (4, 8, 16)
    shared = {} if not options.quick else {"heads_q": 4, "heads_kv": 2, "head_dim": 32}
    own = shared | {"heads_kv": 32 if not options.quick else 4}
    parts = {"page 16": (few, shared), "page 64": (many, shared), "own heads": (many, own), "long pages": (most, own)}
    with torch.no_grad():
        for part, (page_size, heads) in parts.items():
            if options.wants(part):
                for requests, length in sizes:
                    _measure(Batch((length,) * requests, "equal", page_size, **heads), device, writer, rounds)


def around_centres(batch: Batch, device: str) -> Tensors:
    """What `paged.tensors` gives, with pages whose tokens are alike."""
    given = tensors(batch, dtype_of(device), device)
    generator = torch.Generator(device).manual_seed(1)
    pages, _, _, heads, dim = given.pool.shape
    centres = torch.randn(pages, 2, 1, heads, dim, generator=generator, device=device).to(given.pool.dtype)
    given.pool.mul_(0.5).add_(centres)
    assert isinstance(given.layout.block_table, torch.Tensor)
    near = given.layout.block_table[:, given.layout.block_table.shape[1] // 2].long()
    of_keys = centres[near, 0, 0].repeat_interleave(batch.heads_q // batch.heads_kv, 1)
    given.q.add_(of_keys[:, None])
    return given


def contenders(batch: Batch, given: Tensors) -> dict[str, Callable[[], torch.Tensor]]:
    """Who decodes this batch; each gives o (batch, 1, heads, dim)."""
    q, device = given.q, given.q.device.type
    k, v = (x.contiguous() for x in given.pool.unbind(1))
    lengths = torch.tensor([0, *batch.lengths], device=q.device).cumsum(0).to(torch.int32)
    whole = tw.Paged(given.layout.block_table, given.layout.seqlens_k, lengths)

    def with_columns(bits: int) -> tw.Paged:
        summaries = tw.PageSummaries.of(k, v, columns=bits)
        tw.summarize_pages(k, v, summaries, whole, sum(batch.lengths))
        return tw.Paged(given.layout.block_table, given.layout.seqlens_k, summaries=summaries)

    eight, four = with_columns(8), with_columns(4)
    pages = max(2, batch.lengths[0] // batch.page_size // SHARE)
    rank, tokens = min(RANK, batch.head_dim // 4), batch.lengths[0] // SHARE
    chosen: dict[str, tuple[tw.TopPages | tw.SparQ, tw.Paged]] = {
        "pages": (tw.TopPages(pages), eight), "pages_mean": (tw.TopPages(pages, by="mean"), eight),
        "pages_summary": (tw.TopPages(pages, far="summary"), eight),
        "tokens": (tw.SparQ(rank, tokens), eight), "tokens_4bits": (tw.SparQ(rank, tokens), four),
        "tokens_4bits_16th": (tw.SparQ(rank // 2, tokens // 2), four),
    }  # fmt: skip
    row = "hopper_decode" if device == "cuda" else "cpu_tiled"

    def attend(layout: tw.Paged, **arguments: Any) -> Callable[[], torch.Tensor]:
        return graphed(lambda: tw.attention(q, k, v, impl=row, layout=layout, **arguments), device)

    found = {f"tilewise.{row}": attend(eight)}
    for name, (select, layout) in chosen.items():
        found[f"tilewise.{row}.{name}"] = attend(layout, select=select)
    if device == "cuda":
        dense = torch.randn((2, len(batch.lengths), batch.lengths[0], *k.shape[2:]), device=q.device).to(q.dtype)
        call = sdpa(SDPA_BACKENDS[device]["cudnn"], False)
        found["cudnn.contiguous"] = graphed(lambda: call(q, dense[0], dense[1]), device)
    return found


def _measure(batch: Batch, device: str, writer: Writer, rounds: int) -> None:
    given = around_centres(batch, device)
    want = reference(batch, given, 0)
    found = contenders(batch, given)
    timed = interleaved(found, device=device, rounds=rounds)
    read = 2 * sum(batch.lengths) * batch.heads_kv * batch.head_dim * given.q.element_size()
    for name, call in found.items():
        times = timed[name].quantiles
        error: dict[str, Any] | None = {"metric": "failure", "message": timed[name].failure}
        if times:
            value = relative_error(call()[0, 0], want) if ".contiguous" not in name else None
            metric = "relative l2 to float64 over all tokens, one request"
            error = None if value is None else {"metric": metric, "value": value}
        writer.write(
            QUESTION, batch.problem | {"dtype": str(given.q.dtype).removeprefix("torch."), "read": f"1/{SHARE}"}, name,
            times_ms=times, gbps=read / times[1] / 1e6 if times else None, error=error,
            includes="one step: choice, attention and merge, replayed from a CUDA graph", sources=sources_of(name),
        )  # fmt: skip
