"""Questions `attention_forward` and `attention_backward`: seven formulas at B=2 H=16 S=8192 D=128 bf16.

Contenders: our rows, compiled FlexAttention (its block mask built before the clock starts, as its users do), and
SDPA's cuDNN and FlashAttention-2 back ends where they can do the problem. TFLOP/s count the visible area only:
4 * head_dim operations per visible pair forward, 2.5 times that backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.contenders import (
    HEAD,
    INCLUDES,
    SDPA_BACKENDS,
    Attention,
    Comparison,
    heads_first,
    inputs,
    measure,
    sdpa,
    tilewise,
)
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import MaskMod, ScoreMod, head_slice, visible_pairs
from benchmarks.timing import TURN_MS, TURNS, ceilings, method

# Eight documents of unequal lengths, none a multiple of a tile, as fractions of 8192.
DOCUMENTS = (250, 517, 771, 1019, 1283, 1530, 1797, 1025)
BATCH = 2
ROWS = {"cuda": ("triton", "hopper"), "cpu": ("cpu_tiled",)}
QUESTIONS = {
    "attention_forward": INCLUDES[0] + "; flex: block mask built beforehand",
    "attention_backward": INCLUDES[1],
}


@dataclass(frozen=True)
class Formula:
    """One formula twice: for tilewise, and as the plain functions that FlexAttention and the reference take."""

    name: str
    causal: bool
    ours: tuple[Any, Any]
    mask: MaskMod | None = None
    score: ScoreMod | None = None
    sdpa: bool = False

    @property
    def part(self) -> str:
        """Its name for --only."""
        return self.name.split()[0]


def document_ids(seqlen: int, device: str) -> torch.Tensor:
    """The document of each position: lengths in proportion to DOCUMENTS."""
    bounds = (torch.tensor(DOCUMENTS).cumsum(0) * seqlen) // sum(DOCUMENTS)
    return torch.searchsorted(bounds, torch.arange(seqlen), right=True).to(device, torch.int32)


def alibi_slopes(heads: int, device: str) -> torch.Tensor:
    """ALiBi's slope of each head."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)


def formulas(seqlen: int, heads: int, device: str) -> list[Formula]:
    """The rows of the table, with their tensors on `device`."""
    window = seqlen // 8
    ids, slopes = document_ids(seqlen, device), alibi_slopes(heads, device)
    prefixes = torch.full((BATCH,), window, device=device)

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    return [
        Formula("full", False, (None, None), sdpa=True),
        Formula("causal", True, (tw.causal, None), causal, sdpa=True),
        Formula(
            f"window {window}",
            True,
            (tw.window(window), None),
            lambda b, h, i, j: (i >= j) & (i - j < window),
        ),
        Formula(
            "alibi causal", True, (tw.causal, tw.alibi(slopes)), causal, lambda s, b, h, i, j: s + slopes[h] * (j - i)
        ),
        Formula(
            "softcap causal",
            True,
            (tw.causal, tw.softcap(30.0)),
            causal,
            lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
        ),
        Formula("document", False, (tw.document(ids, ascending=True), None), lambda b, h, i, j: ids[i] == ids[j]),
        Formula(
            f"prefix {window}",
            False,
            (tw.causal | tw.prefix(prefixes), None),
            lambda b, h, i, j: (i >= j) | (j < prefixes[b]),
        ),
    ]


def contenders(formula: Formula, seqlen: int, device: str) -> dict[str, Attention]:
    """Each takes and returns (batch, seqlen, heads, head_dim) views of its own native memory layout."""
    mask, score = formula.ours
    found = {f"tilewise.{row}": tilewise(row, mask=mask, score=score) for row in ROWS[device]}
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(formula.mask, None, None, seqlen, seqlen, device=device) if formula.mask else None

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled(*heads_first(q, k, v), score_mod=formula.score, block_mask=block_mask).transpose(1, 2)

    found["flex"] = flex
    for name, backend in SDPA_BACKENDS[device].items() if formula.sdpa else ():
        found[name] = sdpa(backend, formula.causal)
    return found


def run(options: Options) -> None:
    """Measure every formula; one record per contender, formula and direction."""
    device, rounds = options.device, min(options.rounds, TURNS)
    seqlen, heads, head_dim = (8192, 16, 128) if not options.quick else (256, 4, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=256, copy_bytes=2**20)
    writer = Writer(
        current(device),
        method=method(device, rounds, turn_ms=TURN_MS),
        ceilings=(ceiling[0], None),
        results=options.out,
    )
    for formula in formulas(seqlen, heads, device):
        if not options.wants(formula.part):
            continue
        shape = (BATCH, seqlen, heads, head_dim)
        pairs = visible_pairs(formula.mask, seqlen, device)
        problem = {
            "batch": BATCH, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_q": heads, "num_heads_kv": heads,
            "head_dim": head_dim, "causal": formula.causal, "dtype": str(dtype).removeprefix("torch."),
            "formula": formula.name, "visible": round(pairs / seqlen**2, 6),
        }  # fmt: skip
        tensors = inputs(shape, dtype, device)
        want = head_slice(*tensors, mask=formula.mask, score=formula.score, batch=HEAD[0], head=HEAD[1])
        del tensors
        measure(
            Comparison(problem, 4 * head_dim * pairs * BATCH * heads, want),
            contenders(formula, seqlen, device),
            # FlexAttention's lie in memory as its users' do
            lambda name, shape=shape: inputs(shape, dtype, device, heads_first=name == "flex"),
            QUESTIONS,
            writer,
            device=device,
            rounds=rounds,
            turn_ms=TURN_MS,
        )
