"""Questions `cpu_forward`, `cpu_backward` and `cpu_memory`: fp32 on the CPU against SDPA.

Where SDPA has the meaning itself (full, causal), and where its user has to hand it a dense mask (window 512). Memory
is the peak that one forward call adds, at three lengths, so that linear and quadratic growth show.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.contenders import HEAD, INCLUDES, Attention, Comparison, inputs, measure
from benchmarks.environment import current
from benchmarks.memory import cpu_peak_mib
from benchmarks.records import Writer
from benchmarks.reference import MaskMod, head_slice, visible_pairs
from benchmarks.timing import Call, ceilings, method
from tools.families import FAMILIES

WINDOW = 512
BATCH, HEADS, HEAD_DIM = 1, 4, 64
IMPLS = ("tilewise.cpu", "sdpa")
QUESTIONS = {"cpu_forward": "forward without gradients; sdpa: dense mask built beforehand", "cpu_backward": INCLUDES[1]}


def _mask_mod(formula: str) -> MaskMod | None:
    if formula == "full":
        return None
    if formula == "causal":
        return lambda b, h, i, j: i >= j
    return lambda b, h, i, j: (i >= j) & (i - j < WINDOW)


def _attention(impl: str, formula: str, seqlen: int) -> Attention:
    """(batch, seqlen, heads, head_dim) in and out; SDPA's dense mask is built here, before any clock starts."""
    if impl == "tilewise.cpu":
        mask = {"full": None, "causal": tw.causal, "window": tw.window(WINDOW)}[formula]
        return lambda q, k, v: tw.attention(q, k, v, mask=mask)
    index = torch.arange(seqlen)
    mask_mod = _mask_mod("window")
    zero = torch.zeros((), dtype=torch.long)
    dense = mask_mod(zero, zero, index[:, None], index[None, :]) if formula == "window" and mask_mod else None

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=formula == "causal")
        return o.transpose(1, 2)

    return sdpa


def _inputs(seqlen: int) -> list[torch.Tensor]:
    return inputs((BATCH, seqlen, HEADS, HEAD_DIM), torch.float32, "cpu")


def prepare(impl: str, formula: str, seqlen: int) -> tuple[Call, Call]:
    """For the memory measurement in a fresh process: a small call that loads the code, and the call, mask included."""
    small, large = ([t.detach() for t in _inputs(length)[:3]] for length in (64, seqlen))
    return lambda: _attention(impl, formula, 64)(*small), lambda: _attention(impl, formula, seqlen)(*large)


def run(options: Options) -> None:
    """Time forward and backward, then measure memory."""
    rounds = min(options.rounds, 20)
    lengths = (
        {"full": 2048, "causal": 2048, "window": 8192} if not options.quick else dict.fromkeys(("full", "window"), 256)
    )
    ceiling = ceilings("cpu") if not options.quick else ceilings("cpu", size=128, copy_bytes=2**20)
    writer = Writer(current("cpu"), method=method("cpu", rounds), ceilings=(ceiling[0], None), results=options.out)
    for formula, seqlen in lengths.items():
        if options.wants(formula):
            _times(formula, seqlen, rounds, writer)
    if options.wants("memory"):
        for seqlen in (4096, 8192, 16384) if not options.quick else (512,):
            for impl in IMPLS:
                writer.write(
                    "cpu_memory",
                    _problem("window", seqlen),
                    impl,
                    peak_mib=cpu_peak_mib(prepare, impl, "window", seqlen),
                    includes="one forward call without gradients, the mask it needs included, the output too",
                    sources=_sources(impl),
                )


def _problem(formula: str, seqlen: int) -> dict[str, Any]:
    return {
        "batch": BATCH, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_q": HEADS, "num_heads_kv": HEADS,
        "head_dim": HEAD_DIM, "causal": formula != "full", "dtype": "float32", "threads": torch.get_num_threads(),
        "formula": f"window {WINDOW}" if formula == "window" else formula,
    }  # fmt: skip


def _sources(impl: str) -> str | None:
    return FAMILIES["attention_cpu"].hash() if impl.startswith("tilewise.") else None


def _times(formula: str, seqlen: int, rounds: int, writer: Writer) -> None:
    mask = _mask_mod(formula)
    want = head_slice(*_inputs(seqlen), mask=mask, score=None, batch=HEAD[0], head=HEAD[1])
    operations = 4 * HEAD_DIM * visible_pairs(mask, seqlen, "cpu") * BATCH * HEADS
    measure(
        Comparison(_problem(formula, seqlen), operations, want),
        {impl: _attention(impl, formula, seqlen) for impl in IMPLS},
        lambda _: _inputs(seqlen),
        QUESTIONS,
        writer,
        device="cpu",
        rounds=rounds,
        sources=_sources,
        recorded=False,
    )
