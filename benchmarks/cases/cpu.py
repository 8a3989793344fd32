"""Questions `cpu_forward`, `cpu_backward` and `cpu_memory`: fp32 on the CPU against SDPA.

Where SDPA has the meaning itself (full, causal), and where its user has to hand it a dense mask (window 512). Memory
is the peak that one forward call adds, at three lengths, so that linear and quadratic growth show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.environment import current
from benchmarks.memory import cpu_peak_mib
from benchmarks.records import Writer
from benchmarks.reference import MaskMod, head_slice, relative_error, visible_pairs
from benchmarks.timing import ceilings, interleaved, method
from tools.families import FAMILIES

WINDOW = 512
BATCH, HEADS, HEAD_DIM = 1, 4, 64
Call = Callable[[], Any]


def _mask_mod(formula: str) -> MaskMod | None:
    if formula == "full":
        return None
    if formula == "causal":
        return lambda b, h, i, j: i >= j
    return lambda b, h, i, j: (i >= j) & (i - j < WINDOW)


def _attention(impl: str, formula: str, seqlen: int) -> Callable[..., torch.Tensor]:
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


def _inputs(seqlen: int, grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, seqlen, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=generator).requires_grad_(grad and index < 3) for index in range(4)]


def prepare(impl: str, formula: str, seqlen: int) -> tuple[Call, Call]:
    """For the memory measurement in a fresh process: a small call that loads the code, and the call, mask included."""
    small, large = (_inputs(length, grad=False)[:3] for length in (64, seqlen))
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
            for impl in ("tilewise.cpu", "sdpa"):
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
    q, k, v, do = _inputs(seqlen, grad=False)
    mask = _mask_mod(formula)
    want = head_slice(q, k, v, do, mask=mask, score=None, batch=0, head=1)
    operations = 4 * HEAD_DIM * visible_pairs(mask, seqlen, "cpu") * BATCH * HEADS
    forward: dict[str, Call] = {}
    backward: dict[str, Call] = {}
    errors: dict[str, tuple[float, float]] = {}
    for impl in ("tilewise.cpu", "sdpa"):
        attention = _attention(impl, formula, seqlen)
        q, k, v, do = _inputs(seqlen, grad=True)
        o = attention(q, k, v)
        grads = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        got = [t[0, :, 1] for t in (o.detach(), *grads)]
        each = [relative_error(t, w) for t, w in zip(got, (want.o, want.dq, want.dk, want.dv), strict=True)]
        errors[impl] = (each[0], max(each[1:]))
        plain = [t.detach() for t in (q, k, v)]
        forward[impl] = lambda attention=attention, plain=plain: attention(*plain)
        backward[impl] = lambda o=o, qkv=(q, k, v), do=do: torch.autograd.grad(o, qkv, do, retain_graph=True)
    for direction, (question, calls) in enumerate((("cpu_forward", forward), ("cpu_backward", backward))):
        for impl, timed in interleaved(calls, device="cpu", rounds=rounds).items():
            times = timed.quantiles
            writer.write(
                question,
                _problem(formula, seqlen),
                impl,
                times_ms=times,
                tflops=operations * (1, 2.5)[direction] / times[1] / 1e9 if times else None,
                error={"metric": "failure", "message": timed.failure}
                if timed.failure
                else {"metric": "relative l2 to float64, one head", "value": float(f"{errors[impl][direction]:.3g}")},
                includes=(
                    "forward without gradients; sdpa: dense mask built beforehand",
                    "torch.autograd.grad of q, k, v from a saved forward",
                )[direction],
                sources=_sources(impl),
            )
