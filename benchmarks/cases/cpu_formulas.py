"""Questions `cpu_formula_forward` and `cpu_formula_backward`: formulas in fp32 on the CPU against dense ones.

SDPA gets the mask or bias as a tensor, made before any clock starts. It has no softcap: there it computes another
problem, with a bias of zeros, for its time alone, and `eager` (a product, tanh, softmax, a product) is the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.cases.attention_formula import alibi_slopes, document_ids
from benchmarks.contenders import HEAD, INCLUDES, Attention, Comparison, heads_first, inputs, measure
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import MaskMod, ScoreMod, head_slice, visible_pairs
from benchmarks.timing import ceilings, method
from tools.families import FAMILIES

WINDOW, CAP = 256, 30.0
SHAPES = ((8, 8, 64), (16, 16, 64), (8, 8, 128), (8, 2, 64))  # heads of queries, heads of keys, head dimension
LENGTHS = (512, 1024, 2048, 4096)
QUESTIONS = {"cpu_formula_forward": "forward; dense mask or bias built beforehand", "cpu_formula_backward": INCLUDES[1]}


@dataclass(frozen=True)
class Formula:
    """One formula twice: for tilewise, and as plain functions for dense tensors and the reference."""

    name: str
    ours: dict[str, Any]
    mask: MaskMod | None = None
    score: ScoreMod | None = None

    def dense(self, seqlen: int, heads: int) -> torch.Tensor:
        """The mask (seqlen, seqlen), or the bias (1, heads or 1, seqlen, seqlen), for SDPA's fused kernel."""
        i, j = torch.arange(seqlen)[:, None], torch.arange(seqlen)
        b, h = torch.zeros((), dtype=torch.long), torch.arange(heads)[:, None, None]
        seen = torch.ones(seqlen, seqlen, dtype=torch.bool) if self.mask is None else self.mask(b, h, i, j)
        if self.score is None:
            return seen
        bias = torch.zeros(1, seqlen, seqlen) if self.name == "softcap" else self.score(torch.zeros(()), b, h, i, j)
        return bias.float().masked_fill(~seen, -torch.inf)[None]


def formulas(seqlen: int, heads: int) -> list[Formula]:
    """The rows of the table."""
    ids, slopes = document_ids(seqlen, "cpu"), alibi_slopes(heads, "cpu")

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j).abs()

    return [
        Formula("alibi", {"score": tw.alibi(slopes)}, None, alibi),
        Formula("alibi causal", {"score": tw.alibi(slopes), "mask": tw.causal}, causal, alibi),
        Formula("softcap", {"score": tw.softcap(CAP)}, None, lambda s, b, h, i, j: CAP * torch.tanh(s / CAP)),
        Formula(f"window {WINDOW}", {"mask": tw.window(WINDOW)}, lambda b, h, i, j: (i >= j) & (i - j < WINDOW)),
        Formula("documents", {"mask": tw.document(ids, ascending=True)}, lambda b, h, i, j: ids[i] == ids[j]),
    ]


def contenders(formula: Formula, seqlen: int, heads: int, group: int) -> dict[str, Attention]:
    """Each takes and returns (batch, seqlen, heads, head_dim)."""
    dense = formula.dense(seqlen, heads)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = F.scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=dense, enable_gqa=group > 1)
        return o.transpose(1, 2)

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = heads_first(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
        s = CAP * torch.tanh(q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 / CAP))
        return (s.softmax(-1) @ v).transpose(1, 2)

    found: dict[str, Attention] = {"tilewise.cpu": lambda q, k, v: tw.attention(q, k, v, **formula.ours)}
    if formula.name != "softcap":
        return found | {"sdpa": sdpa}
    return found | {"eager": eager, "sdpa.zero_bias": sdpa}


def run(options: Options) -> None:
    """Time each formula at each length; `--only` takes first words of formulas, lengths do not split."""
    rounds = min(options.rounds, 20)
    ceiling = ceilings("cpu") if not options.quick else ceilings("cpu", size=128, copy_bytes=2**20)
    writer = Writer(current("cpu"), method=method("cpu", rounds), ceilings=(ceiling[0], None), results=options.out)
    for heads, heads_kv, head_dim in SHAPES if not options.quick else ((4, 2, 16),):
        for seqlen in LENGTHS if not options.quick else (256,):
            for formula in formulas(seqlen, heads):
                if options.wants(formula.name.split()[0]):
                    _times(formula, seqlen, (heads, heads_kv, head_dim), rounds, writer)


def _times(formula: Formula, seqlen: int, sizes: tuple[int, int, int], rounds: int, writer: Writer) -> None:
    heads, heads_kv, head_dim = sizes
    problem = {
        "batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_q": heads, "num_heads_kv": heads_kv,
        "head_dim": head_dim, "dtype": "float32", "threads": torch.get_num_threads(), "formula": formula.name,
    }  # fmt: skip

    def made(_: str = "") -> list[torch.Tensor]:
        return inputs((1, seqlen, heads, head_dim), torch.float32, "cpu", heads_kv=heads_kv)

    want = head_slice(*made(), mask=formula.mask, score=formula.score, batch=HEAD[0], head=HEAD[1])
    measure(
        Comparison(problem, 4 * head_dim * visible_pairs(formula.mask, seqlen, "cpu") * heads, want),
        contenders(formula, seqlen, heads, heads // heads_kv),
        made,
        QUESTIONS,
        writer,
        device="cpu",
        rounds=rounds,
        sources=lambda impl: FAMILIES["attention_cpu"].hash() if impl.startswith("tilewise.") else None,
        recorded=False,
    )
