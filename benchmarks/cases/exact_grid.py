"""Questions `exact_forward` and `exact_backward`: attention without a formula, full and causal, bf16.

The grid (parts d64, d128, d256): 16,384 tokens in all, heads times head_dim 2048, lengths 512 to 16,384. Beside it
grouped queries (part gqa) and documents of Zipf lengths, packed (part packed). Contenders: our rows, in the grid
also with gradients that repeat bit by bit, SDPA's cuDNN and FlashAttention-2 back ends, PyTorch's varlen attention, and
FlashAttention-4 where `flash_attn.cute` imports (`pip install --pre flash-attn-4`); the record's method says
whether it took part. FlexAttention would compile once a cell: see `attention_formula`. TFLOP/s count the visible area
only: 4 * head_dim operations per visible pair forward, 2.5 times that backward. At most five turns
(`timing.TURNS`), so that all of it takes a few minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.contenders import (
    HEAD,
    INCLUDES,
    SDPA_BACKENDS,
    Attention,
    Comparison,
    fa4,
    find_fa4,
    has_torch_varlen,
    inputs,
    measure,
    sdpa,
    tilewise,
    torch_varlen,
)
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import Slice, head_slice
from benchmarks.timing import TURN_MS, TURNS, ceilings, method

QUESTIONS = dict(zip(("exact_forward", "exact_backward"), INCLUDES, strict=True))
ROWS = {"cuda": ("triton", "hopper"), "cpu": ("cpu_sdpa", "cpu_tiled")}


@dataclass(frozen=True)
class Cell:
    """One problem: sequences of these lengths, equal ones unless packed; `part` is its name for --only."""

    part: str
    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool
    packed: bool = False
    repeats: bool = False  # the last of our rows also runs with gradients that repeat bit by bit

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of q."""
        rows = (sum(self.lengths),) if self.packed else (len(self.lengths), self.lengths[0])
        return (*rows, self.heads_q, self.head_dim)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head, all sequences together."""
        return sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)

    @property
    def problem(self) -> dict[str, Any]:
        """What the record says, but for the dtype and the visible part."""
        rows: dict[str, Any] = {"seqlen_q": self.lengths[0], "seqlen_k": self.lengths[0]}
        if self.packed:
            rows = {"total": sum(self.lengths), "longest": max(self.lengths), "lengths": "Zipf, shuffled"}
        return {
            "part": self.part, "batch": len(self.lengths), **rows, "num_heads_q": self.heads_q,
            "num_heads_kv": self.heads_kv, "head_dim": self.head_dim, "causal": self.causal,
            "formula": "causal" if self.causal else "full",
        }  # fmt: skip


def zipf_lengths(documents: int, total: int) -> tuple[int, ...]:
    """Lengths in proportion to 1, 1/2, 1/3, ..., in an order that stays the same, `total` in sum."""
    shares = 1.0 / torch.arange(1, documents + 1, dtype=torch.float64)
    lengths = (shares / shares.sum() * total).long()
    lengths[0] += total - int(lengths.sum())
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(0))
    return tuple(lengths[order].tolist())


def cells(quick: bool) -> Iterator[Cell]:
    """All problems, in the order of the table."""
    tokens, width, head_dims, lengths = 16_384, 2048, [64, 128, 256], [512, 1024, 4096, 16_384]
    if quick:
        tokens, width, head_dims, lengths = 128, 64, [8, 16], [64, 128]
    for head_dim in head_dims:
        for causal in (False, True):
            for seqlen in lengths:
                heads = width // head_dim
                sequences = (seqlen,) * (tokens // seqlen)
                yield Cell(f"d{head_dim}", sequences, heads, heads, head_dim, causal, repeats=True)
    head_dim, seqlen, heads_q, heads_kv = (128, 8192, 32, 8) if not quick else (16, 96, 4, 2)
    yield Cell("gqa", (seqlen,) * 2, heads_q, heads_kv, head_dim, True)
    documents, total, heads = (32, 65_536, 16) if not quick else (5, 200, 4)
    yield Cell("packed", zipf_lengths(documents, total), heads, heads, head_dim, True, packed=True)


def contenders(cell: Cell, device: str, fa4_module: Any) -> dict[str, Attention]:
    """Who computes this cell; our rows are asked in any case and may say that it is not for them."""
    mask = tw.causal if cell.causal else None
    if not cell.packed:
        found = {f"tilewise.{row}": tilewise(row, mask=mask) for row in ROWS[device]}
        if cell.repeats:
            row = ROWS[device][-1]
            found[f"tilewise.{row}.deterministic"] = tilewise(row, mask=mask, deterministic=True)
        found |= {name: sdpa(backend, cell.causal) for name, backend in SDPA_BACKENDS[device].items()}
        return found | ({"fa4": fa4(fa4_module, cell.causal)} if fa4_module else {})
    cu_seqlens = torch.tensor([0, *cell.lengths]).cumsum(0).to(device, torch.int32)
    packed = (cu_seqlens, max(cell.lengths))
    found = {f"tilewise.{row}": tilewise(row, mask=mask, layout=tw.Packed(cu_seqlens)) for row in ROWS[device]}
    if has_torch_varlen(device):
        found["torch_varlen"] = torch_varlen(cell.causal, packed)
    return found | ({"fa4": fa4(fa4_module, cell.causal, packed)} if fa4_module else {})


def reference(cell: Cell, tensors: list[torch.Tensor]) -> Slice:
    """One head in float64; packed, that head of all documents one after another."""
    mask = (lambda b, h, i, j: i >= j) if cell.causal else None
    if not cell.packed:
        q, k, v, do = tensors
        return head_slice(q, k, v, do, mask=mask, score=None, batch=HEAD[0], head=HEAD[1])
    documents = zip(*(t.detach().split(cell.lengths) for t in tensors), strict=True)
    slices = [
        head_slice(*(t[None] for t in document), mask=mask, score=None, batch=0, head=HEAD[1]) for document in documents
    ]
    return Slice(*(torch.cat([getattr(part, name) for part in slices]) for name in ("o", "dq", "dk", "dv")))


def run(options: Options) -> None:
    """Measure every cell; one record per contender, cell and direction."""
    device, rounds = options.device, min(options.rounds, TURNS)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    fa4_module, fa4_says = find_fa4(device)
    print(fa4_says, flush=True)
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    writer = Writer(
        current(device),
        method=f"{method(device, rounds, turn_ms=TURN_MS)}; {fa4_says}",
        ceilings=(ceiling[0], None),
        results=options.out,
    )
    for cell in cells(options.quick):
        if not options.wants(cell.part):
            continue

        def make(name: str, cell: Cell = cell) -> list[torch.Tensor]:
            return inputs(cell.shape, dtype, device, heads_kv=cell.heads_kv)

        problem = cell.problem | {"dtype": str(dtype).removeprefix("torch.")}
        comparison = Comparison(problem, 4 * cell.head_dim * cell.pairs * cell.heads_q, reference(cell, make("")))
        measure(
            comparison, contenders(cell, device, fa4_module), make, QUESTIONS, writer, device=device, rounds=rounds,
            turn_ms=TURN_MS,
        )  # fmt: skip
