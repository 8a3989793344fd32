"""Calls whose integer tensors something else writes between two calls: what each must give is what new tensors give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters import flash_attn, flash_attn_interface, flashinfer

Tensors = dict[str, torch.Tensor]
PAGE, PAGES, BATCH, HEADS, DIM = 4, 12, 2, 2, 16
TOTAL = 24


@dataclass(frozen=True)
class Entry:
    """A public call: `start` and `then` are the values of its integer tensors, before and after they are written, and
    `make` gives from these tensors what calls it.
    """

    start: Callable[[], Tensors]
    then: Callable[[], Tensors]
    make: Callable[[Tensors], Callable[[], torch.Tensor]]
    captured: bool = True  # whether a CUDA graph may capture it


def check(entry: str, write: Callable[[torch.Tensor, torch.Tensor], object], device: str) -> None:
    """That a call reads what `write` has put into its tensors since the call before."""
    one = ENTRIES[entry]
    given, after = ({name: x.to(device) for name, x in values().items()} for values in (one.start, one.then))
    call = one.make(given)
    with torch.no_grad():
        before = call()
        for name, x in given.items():
            write(x, after[name])
        found = call()
        want = one.make({name: x.clone() for name, x in after.items()})()
    assert torch.equal(found, want)
    assert not torch.equal(found, before), "the values count for something"


def _int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _packed(*ends: int) -> Callable[[], Tensors]:
    return lambda: {"cu": _int32(0, *ends, TOTAL)}


def _paged(lengths: tuple[int, ...], *tables: tuple[int, ...]) -> Callable[[], Tensors]:
    return lambda: {"table": _int32(*tables), "lengths": _int32(*lengths)}


def numbers(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


def _dtype(device: torch.device) -> torch.dtype:
    """One that all implementations for the device take."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _rows(x: torch.Tensor, count: int = TOTAL) -> tuple[torch.Tensor, ...]:
    return tuple(numbers(count, HEADS, DIM, device=x.device, seed=n).to(_dtype(x.device)) for n in range(3))


def _queries(x: torch.Tensor, count: int) -> torch.Tensor:
    return numbers(BATCH, count, HEADS, DIM, device=x.device).to(_dtype(x.device))


def _pools(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (numbers(PAGES, PAGE, HEADS, DIM, device=x.device, seed=n).to(_dtype(x.device)) for n in (3, 4))
    return first, second


def over_rows(**arguments: Any) -> Callable[[Tensors], Callable[[], torch.Tensor]]:
    """Attention of packed sequences."""

    def make(given: Tensors) -> Callable[[], torch.Tensor]:
        q, k, v = _rows(given["cu"])
        return lambda: tw.attention(q, k, v, layout=tw.Packed(given["cu"]), **arguments)

    return make


def over_pages(**arguments: Any) -> Callable[[Tensors], Callable[[], torch.Tensor]]:
    """Attention of two queries of each request over its pages."""

    def make(given: Tensors) -> Callable[[], torch.Tensor]:
        q = _queries(given["table"], 2)
        layout, pools = tw.Paged(given["table"], given["lengths"]), _pools(q)
        return lambda: tw.attention(q, *pools, layout=layout, **arguments)

    return make


def _by_summaries(select: Any) -> Callable[[Tensors], Callable[[], torch.Tensor]]:
    def make(given: Tensors) -> Callable[[], torch.Tensor]:
        q = _queries(given["table"], 1)
        pools = _pools(q)
        summaries = tw.PageSummaries.of(*pools, columns=8)
        whole, tokens = torch.arange(PAGES, dtype=torch.int32, device=q.device)[None], PAGES * PAGE
        filled = tw.Paged(whole, _int32(tokens).to(q.device), _int32(0, tokens).to(q.device))
        tw.summarize_pages(*pools, summaries, filled, tokens)
        layout = tw.Paged(given["table"], given["lengths"], summaries=summaries)
        return lambda: tw.attention(q, *pools, layout=layout, select=select)

    return make


def _planned(given: Tensors) -> Callable[[], torch.Tensor]:
    q = _queries(given["table"], 2)
    pools = _pools(q)
    plan = tw.plan(q, *pools, layout=tw.Paged(given["table"], given["lengths"]), mask=tw.causal)

    def call() -> torch.Tensor:
        plan.update()
        return plan.run(q, *pools)

    return call


def _documents(given: Tensors) -> Callable[[], torch.Tensor]:
    q, k, v = (x[None] for x in _rows(given["ids"]))
    mask = tw.causal & tw.document(given["ids"])
    return lambda: tw.attention(q, k, v, mask=mask)


def _looked_up(given: Tensors) -> Callable[[], torch.Tensor]:
    q, k, v = (x[None] for x in _rows(given["ids"]))
    table = numbers(3, device=q.device)
    return lambda: tw.attention(q, k, v, score=lambda s, b, h, i, j: s + table[given["ids"][j]])


def _blocks(given: Tensors) -> Callable[[], torch.Tensor]:
    q, k, v = (x[None] for x in _rows(given["kept"]))
    mask = tw.blocks(given["kept"], 8)
    return lambda: tw.attention(q, k, v, mask=mask)


def _merged(given: Tensors) -> Callable[[], torch.Tensor]:
    device = given["cu"].device
    o, lse = numbers(TOTAL, HEADS, DIM, device=device), numbers(HEADS, TOTAL, device=device)
    return lambda: tw.merge_states(o, lse, indptr=given["cu"])[0]


def _written(given: Tensors) -> Callable[[], torch.Tensor]:
    k, v, _ = _rows(given["slots"], 3)
    like = _pools(k)

    def call() -> torch.Tensor:
        pools = [torch.zeros_like(x) for x in like]
        tw.kv_write(k, v, *pools, given["slots"])
        return torch.stack(pools)

    return call


def _copied(given: Tensors) -> Callable[[], torch.Tensor]:
    whole = _pools(given["pairs"])

    def call() -> torch.Tensor:
        pools = [x.clone() for x in whole]
        tw.copy_pages(*pools, given["pairs"])
        return torch.stack(pools)

    return call


def _turned(given: Tensors) -> Callable[[], torch.Tensor]:
    device = given["positions"].device
    cos, sin = (numbers(64, DIM // 2, device=device, seed=n) for n in (0, 1))
    x, _, _ = _rows(given["positions"])
    return lambda: tw.rope(x, rope=tw.Rope(cos, sin, given["positions"]))


def _loss(given: Tensors) -> Callable[[], torch.Tensor]:
    logits = numbers(TOTAL, 8, device=given["targets"].device)
    return lambda: tw.cross_entropy(logits, given["targets"])


def _varlen(given: Tensors) -> Callable[[], torch.Tensor]:
    q, k, v = (x.to(torch.bfloat16) for x in _rows(given["cu"]))
    return lambda: flash_attn.flash_attn_varlen_func(q, k, v, given["cu"], given["cu"], TOTAL, TOTAL, causal=True)


def _kvcache(function: Callable[..., Any], table: str) -> Callable[[Tensors], Callable[[], torch.Tensor]]:
    def make(given: Tensors) -> Callable[[], torch.Tensor]:
        q = _queries(given["table"], 1).to(torch.bfloat16)
        pools = [x.to(torch.bfloat16) for x in _pools(q)]
        return lambda: function(q, *pools, cache_seqlens=given["lengths"], **{table: given["table"]})

    return make


def _ragged(given: Tensors) -> Callable[[], torch.Tensor]:
    q, k, v = _rows(given["cu"])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, dtype=torch.uint8, device=q.device))

    def call() -> torch.Tensor:
        wrapper.plan(given["cu"], given["cu"], HEADS, HEADS, DIM, causal=True, q_data_type=q.dtype)
        found: torch.Tensor = wrapper.run(q, k, v)
        return found

    return call


_PACKED = {"start": _packed(5), "then": _packed(17)}
_PAGED = {"start": _paged((5, 9), (0, 1, 2), (3, 4, 5)), "then": _paged((12, 3), (6, 7, 8), (9, 2, 1))}
_SLOTS = {"start": lambda: {"slots": _int32(0, 9, 3)}, "then": lambda: {"slots": _int32(5, 1, 40)}}
_IDS = {
    "start": lambda: {"ids": _int32(*[0] * 7, *[1] * (TOTAL - 7))},
    "then": lambda: {"ids": _int32(*[1] * 15, *[2] * (TOTAL - 15))},
}
ENTRIES: dict[str, Entry] = {
    "packed": Entry(**_PACKED, make=over_rows(mask=tw.causal)),
    "packed, listed tiles": Entry(**_PACKED, make=over_rows(mask=tw.dilated(2) & tw.causal)),
    "packed, selected": Entry(**_PACKED, make=over_rows(select=tw.Select(tw.TopK(0.5), block=(8, 8)))),
    "packed, few bits": Entry(**_PACKED, make=over_rows(quantize=tw.Sage2())),
    "paged": Entry(**_PAGED, make=over_pages()),
    "paged, masked": Entry(**_PAGED, make=over_pages(mask=tw.window(6))),
    "paged, selected": Entry(**_PAGED, make=over_pages(select=tw.Select(tw.TopK(0.5), block=(2, 4))), captured=False),
    "paged, few bits": Entry(**_PAGED, make=over_pages(quantize=tw.Sage2()), captured=False),
    "paged, selected pages": Entry(**_PAGED, make=_by_summaries(tw.TopPages(1, first=0, local=1))),
    "paged, selected tokens": Entry(**_PAGED, make=_by_summaries(tw.SparQ(4, 3))),
    "planned": Entry(**_PAGED, make=_planned),
    "documents": Entry(**_IDS, make=_documents),
    "looked up": Entry(**_IDS, make=_looked_up, captured=False),
    "blocks": Entry(
        lambda: {"kept": torch.eye(3, dtype=torch.bool)}, lambda: {"kept": torch.ones(3, 3, dtype=torch.bool)}, _blocks
    ),
    "merged": Entry(**_PACKED, make=_merged),
    "written": Entry(**_SLOTS, make=_written),
    "copied": Entry(lambda: {"pairs": _int32((0, 1), (2, 3))}, lambda: {"pairs": _int32((4, 1), (0, 5))}, _copied),
    "rotated": Entry(
        lambda: {"positions": torch.arange(TOTAL)}, lambda: {"positions": torch.arange(TOTAL).flip(0) + 9}, _turned
    ),
    "loss": Entry(
        lambda: {"targets": torch.arange(TOTAL) % 8}, lambda: {"targets": torch.arange(TOTAL) // 3}, _loss
    ),
    "flash_attn, packed": Entry(**_PACKED, make=_varlen),
    "flash_attn, cache": Entry(**_PAGED, make=_kvcache(flash_attn.flash_attn_with_kvcache, "block_table")),
    "flash_attn 3, cache": Entry(
        **_PAGED, make=_kvcache(flash_attn_interface.flash_attn_with_kvcache, "page_table")
    ),
    "flashinfer, packed": Entry(**_PACKED, make=_ragged, captured=False),
}  # fmt: skip
