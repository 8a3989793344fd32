"""Questions `decode_encoded`, `decode_shared` and `mixed`: steps of a server, 32 heads on 8 of 128, pages of 16.

`decode_encoded`: decoding as in `decode`, requests of equal length, over bf16 pages and over codes in pages of a
`tilewise.kv.PagePool`, a head's tokens or (`.NHD`) a token's heads side by side; which of our rows read codes, the
dispatch table says. GB/s count the codes and scales of all tokens once; errors are beside float64 attention over what
the codes stand for.

`decode_shared`: 32 requests that begin with the same 8k tokens, and requests that have nothing in common: as they are,
with `Paged(share_prefixes=True)` where this version has it (`.shared`), and, where there is a prefix, by hand: one
attention over it, one over the rest, merged (`.cascade`), and with pages of its own for each request (`.copies`), which
no cache keeps for the next one. GB/s count tokens that requests share once, of copies all.

`mixed`: one prompt of 8k new tokens beside 63 requests of 4k that decode: one call for all, or one for each part.

Every step is replayed from a CUDA graph where there is a GPU, plan and merge inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.cases.paged import INCLUDES, Batch, Tensors, causal_head, dtype_of, reference, rows_of, tensors
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import relative_error
from benchmarks.steps import ROWS, Contender, measure, refusal
from benchmarks.timing import ceilings, method
from tilewise.kv import PagePool
from tilewise.quant import KINDS, Encoded, encode

ROUNDS = 20
MIXED_ROWS = {"cuda": ("hopper_mixed", "hopper", "triton_paged", "hopper_decode"), "cpu": ("cpu_tiled",)}
ORDERS = {"": None, ".NHD": "NHD"}
TWO_CALLS = {"cuda": ("hopper", "hopper_decode"), "cpu": ("cpu_tiled", "cpu_tiled")}


def run(options: Options) -> None:
    """Measure the questions that are wanted, which are the parts."""
    device, rounds = options.device, min(options.rounds, ROUNDS)
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    writer = Writer(current(device), method=method(device, rounds), ceilings=ceiling, results=options.out)
    with torch.no_grad():
        for question, (problems, compare) in QUESTIONS.items():
            for batch in problems(options.quick) if options.wants(question) else ():
                compare(batch, writer, device, rounds)


def equal(quick: bool, *sizes: tuple[int, int, int]) -> list[Batch]:
    """Batches of (requests, tokens of each, tokens that they share), divided by 64 to see that a case runs."""
    if not quick:
        return [Batch((length,) * batch, "equal", 16, shared=shared) for batch, length, shared in sizes]
    small = {"heads_q": 4, "heads_kv": 2, "head_dim": 16}
    return [
        Batch((length // 64,) * min(batch, 3), "equal", 16, shared=shared // 64, **small)
        for batch, length, shared in sizes
    ]


def problem_of(batch: Batch, says: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the record says."""
    return {
        "workload": says, "batch": len(batch.lengths), "tokens": sum(batch.lengths), "shared": batch.shared,
        "page_size": batch.page_size, "num_heads_q": batch.heads_q, "num_heads_kv": batch.heads_kv,
        "head_dim": batch.head_dim, "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def workload(batch: Batch) -> str:
    """Requests of equal length, in words."""
    shared = f", {batch.shared:,} of them shared" if batch.shared else ""
    return f"{len(batch.lengths)} × {batch.lengths[0]:,} tokens{shared}"


# decode_encoded ------------------------------------------------------------------------------------------------------


def _encoded_problems(quick: bool) -> list[Batch]:
    return equal(quick, (64, 4096, 0), (16, 8192, 0), (128, 1024, 0))


def _encoded(batch: Batch, writer: Writer, device: str, rounds: int) -> None:
    given = tensors(batch, dtype_of(device), device)
    request = len(batch.lengths) - 1
    pools: dict[str, tuple[Any, Any]] = {"": (given.pool[:, 0], given.pool[:, 1])}
    for kind in KINDS:
        pools |= {f".{kind}{name}": encoded_pages(given.pool, kind, order) for name, order in ORDERS.items()}
    contenders, wants = {}, {}
    for kind, (k, v) in pools.items():
        want = reference(batch, given, request, (k, v) if isinstance(k, Encoded) else None)
        for row in ROWS[device]:
            contenders[f"tilewise.{row}{kind}"] = _decoding(
                row, given, k, v, given.layout, row_bytes(k, v) * batch.distinct
            )
            wants[f"tilewise.{row}{kind}"] = want
    measure(
        "decode_encoded", problem_of(batch, workload(batch), given.q.dtype), contenders, writer, device=device,
        rounds=rounds, includes=INCLUDES, error=lambda name, o: relative_error(o[request, 0], wants[name]),
    )  # fmt: skip


def encoded_pages(pool: torch.Tensor, kind: str, order: str | None) -> tuple[Any, Any]:
    """The pages of a pool (num_pages, 2, page_size, num_heads_kv, head_dim) in one that holds codes."""
    num_pages, _, *sizes = pool.shape
    pages: tuple[Any, Any] = PagePool(1, num_pages, *sizes, device=pool.device, order=order, encoding=kind).pages(0)
    for part, to in enumerate(pages):
        codes = encode(pool[:, part], kind)
        to.data.copy_(codes.data)
        to.scale.copy_(codes.scale)
    return pages


def row_bytes(*pages: torch.Tensor | Encoded) -> int:
    """Bytes of one token's keys and values."""
    return sum(x.nbytes // (x.shape[0] * x.shape[1]) for x in pages)


def _decoding(row: str, given: Tensors, k: Any, v: Any, layout: tw.Paged, nbytes: int) -> Contender:
    """One step of decoding by a row of ours, where it can."""
    return Contender(
        lambda: tw.attention(given.q, k, v, layout=layout, impl=row),
        refusal(row, given.q, k, v, layout=layout),
        nbytes=nbytes,
    )


# decode_shared -------------------------------------------------------------------------------------------------------


def _shared_problems(quick: bool) -> list[Batch]:
    return equal(quick, (32, 8192 + 128, 8192), (64, 4096, 0), (128, 1024, 0))


def _shared(batch: Batch, writer: Writer, device: str, rounds: int) -> None:
    given = tensors(batch, dtype_of(device), device)
    request = len(batch.lengths) - 1
    want = reference(batch, given, request)
    k, v = given.pool[:, 0], given.pool[:, 1]
    layouts = {"": given.layout} | ({".shared": sharing(given.layout)} if shares_prefixes() else {})
    nbytes = row_bytes(given.pool[:, 0], given.pool[:, 1]) * batch.distinct
    contenders = {
        f"tilewise.{row}{name}": _decoding(row, given, k, v, layout, nbytes)
        for row in ROWS[device]
        for name, layout in layouts.items()
    }
    wants = {}
    if batch.shared:
        row = ROWS[device][0]
        contenders[f"tilewise.{row}.cascade"] = _cascade(row, batch, given, nbytes)
        apart = replace(batch, shared=0)
        own = tensors(apart, dtype_of(device), device)
        k, v = own.pool[:, 0], own.pool[:, 1]
        contenders[f"tilewise.{row}.copies"] = _decoding(row, own, k, v, own.layout, row_bytes(k, v) * apart.distinct)
        wants[f"tilewise.{row}.copies"] = reference(apart, own, request)
    measure(
        "decode_shared", problem_of(batch, workload(batch), given.q.dtype), contenders, writer, device=device,
        rounds=rounds, includes=INCLUDES,
        error=lambda name, o: relative_error(o.view(given.q.shape)[request, 0], wants.get(name, want)),
    )  # fmt: skip


def shares_prefixes() -> bool:
    """Whether this version's `Paged` finds prefixes that requests share."""
    return "share_prefixes" in inspect.signature(tw.Paged).parameters


def sharing(layout: tw.Paged) -> tw.Paged:
    """The same pages, with prefixes shared."""
    arguments: dict[str, Any] = {"share_prefixes": True}
    return replace(layout, **arguments)


def _cascade(row: str, batch: Batch, given: Tensors, nbytes: int) -> Contender:
    """The prefix as one request with the queries of all, and what is left of each, merged."""
    table, seqlens = given.layout.block_table, given.layout.seqlens_k
    assert isinstance(table, torch.Tensor)
    pages, requests = batch.shared // batch.page_size, len(batch.lengths)
    ends = torch.arange(requests + 1, dtype=torch.int32, device=table.device)
    prefix = tw.Paged(table[:1, :pages], torch.full_like(seqlens[:1], batch.shared), ends[[0, -1]])
    rest = tw.Paged(table[:, pages:], seqlens - batch.shared, ends)
    q, k, v = given.q[:, 0], given.pool[:, 0], given.pool[:, 1]

    def step() -> torch.Tensor:
        return tw.merge(*(tw.attention_with_lse(q, k, v, layout=part, impl=row) for part in (prefix, rest)))[0]

    return Contender(step, refusal(row, q, k, v, layout=prefix), nbytes=nbytes)


# mixed ---------------------------------------------------------------------------------------------------------------


def mixed_problems(quick: bool) -> list[Batch]:
    prompt, decoding = equal(quick, (1, 8192, 0), (63, 4096, 0))
    return [replace(decoding, lengths=prompt.lengths + decoding.lengths)]


def mixed(batch: Batch, given: Tensors) -> tuple[dict[str, Contender], Callable[[str, Any], float]]:
    """(One call or two for a prompt, which the first request is, and requests that decode, and the error of each)."""
    device = given.q.device.type
    new, decoding = batch.lengths[0], len(batch.lengths) - 1
    generator = torch.Generator(device).manual_seed(1)
    prompt = torch.randn(new, *given.q.shape[2:], generator=generator, device=device).to(given.q.dtype)
    q = torch.cat([prompt, given.q[1:, 0]])
    k, v = given.pool[:, 0], given.pool[:, 1]
    table, seqlens = given.layout.block_table, given.layout.seqlens_k
    assert isinstance(table, torch.Tensor)
    cu_seqlens = torch.tensor([0, new, *range(new + 1, new + decoding + 1)], dtype=torch.int32, device=device)
    layout = tw.Paged(table, seqlens, cu_seqlens)
    contenders = {
        f"tilewise.{row}": Contender(
            lambda row=row: tw.attention(q, k, v, mask=tw.causal, layout=layout, impl=row),  # type: ignore[misc]
            refusal(row, q, k, v, mask=tw.causal, layout=layout),
        )
        for row in MIXED_ROWS[device]
    }
    parts = (
        (q[:new][None], tw.Paged(table[:1], seqlens[:1]), TWO_CALLS[device][0]),
        (q[new:][:, None], tw.Paged(table[1:], seqlens[1:]), TWO_CALLS[device][1]),
    )
    refused = [refusal(row, x, k, v, mask=tw.causal, layout=pages) for x, pages, row in parts]
    contenders[f"tilewise.{TWO_CALLS[device][0]}.two_calls"] = Contender(
        lambda: [
            tw.attention(x, k, v, mask=tw.causal, layout=pages, impl=row).flatten(0, 1) for x, pages, row in parts
        ],
        next(filter(None, refused), None),
    )
    first_k, first_v = rows_of(batch, given, 0)
    wants = causal_head(prompt[:, 0], first_k[:, 0], first_v[:, 0]), reference(batch, given, decoding)

    def error(name: str, o: torch.Tensor | list[torch.Tensor]) -> float:
        ours = torch.cat(o) if isinstance(o, list) else o
        return max(relative_error(ours[:new, 0], wants[0]), relative_error(ours[-1], wants[1]))

    return contenders, error


def _mixed(batch: Batch, writer: Writer, device: str, rounds: int) -> None:
    given = tensors(batch, dtype_of(device), device)
    contenders, error = mixed(batch, given)
    says = f"{batch.lengths[0]:,} new tokens, {len(batch.lengths) - 1} × {batch.lengths[1]:,} that decode"
    measure(
        "mixed", problem_of(batch, says, given.q.dtype), contenders, writer, device=device, rounds=rounds,
        includes=f"{INCLUDES}; two_calls: {TWO_CALLS[device][0]} for what is new, {TWO_CALLS[device][1]} for the rest",
        error=error, metric="relative l2 to float64, the worse of one head of the prompt and of one that decodes",
    )  # fmt: skip


QUESTIONS = {
    "decode_encoded": (_encoded_problems, _encoded),
    "decode_shared": (_shared_problems, _shared),
    "mixed": (mixed_problems, _mixed),
}
