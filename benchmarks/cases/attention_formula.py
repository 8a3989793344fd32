"""Questions `attention_forward` and `attention_backward`: six formulas at B=2 H=16 S=8192 D=128 bf16.

Contenders: tilewise, compiled FlexAttention (its block mask built before the clock starts, as its users do), and
SDPA's cuDNN and FlashAttention-2 back ends where they can do the problem. TFLOP/s count the visible area only:
4 * head_dim operations per visible pair forward, 2.5 times that backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import MaskMod, ScoreMod, Slice, head_slice, relative_error, visible_pairs
from benchmarks.timing import ceilings, failure_message, interleaved, method
from tools.families import FAMILIES

# Eight documents of unequal lengths, none a multiple of a tile, as fractions of 8192.
DOCUMENTS = (250, 517, 771, 1019, 1283, 1530, 1797, 1025)
HEAD = (1, 3)  # (batch, head) of the slice that errors are taken on
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Formula:
    """One formula twice: for tilewise, and as the plain functions that FlexAttention and the reference take."""

    name: str
    causal: bool
    ours: tuple[Any, Any]
    mask: MaskMod | None = None
    score: ScoreMod | None = None
    sdpa: bool = False


def formulas(seqlen: int, heads: int, device: str) -> list[Formula]:
    """The six rows of the table, with their tensors on `device`."""
    window = seqlen // 8
    bounds = (torch.tensor(DOCUMENTS).cumsum(0) * seqlen) // sum(DOCUMENTS)
    ids = torch.searchsorted(bounds, torch.arange(seqlen), right=True).to(device, torch.int32)
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)

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
        Formula("document", False, (tw.document(ids), None), lambda b, h, i, j: ids[i] == ids[j]),
    ]


def contenders(formula: Formula, seqlen: int, device: str) -> dict[str, Attention]:
    """Each takes and returns (batch, seqlen, heads, head_dim) views of its own native memory layout."""
    impl = "triton" if device == "cuda" else None
    mask, score = formula.ours
    found: dict[str, Attention] = {
        f"tilewise.{impl or 'cpu'}": lambda q, k, v: tw.attention(q, k, v, mask=mask, score=score, impl=impl)
    }
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(formula.mask, None, None, seqlen, seqlen, device=device) if formula.mask else None

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled(*_heads_first(q, k, v), score_mod=formula.score, block_mask=block_mask).transpose(1, 2)

    found["flex"] = flex
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION} if device == "cuda" else {}
    for name, backend in backends.items() if formula.sdpa else ():

        def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel([backend]):
                o = F.scaled_dot_product_attention(*_heads_first(q, k, v), is_causal=formula.causal)
            return o.transpose(1, 2)

        found[name] = sdpa
    return found


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def _inputs(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """q, k, v, do with the same values for all; FlexAttention's lie in memory as (batch, heads, seqlen, head_dim)."""
    generator = torch.Generator(device).manual_seed(0)
    made = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]
    if name == "flex":
        made = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made]
    return [t.requires_grad_(index < 3) for index, t in enumerate(made)]


def run(options: Options) -> None:
    """Measure every formula; one record per contender, formula and direction."""
    device = options.device
    batch, seqlen, heads, head_dim = (2, 8192, 16, 128) if not options.quick else (2, 256, 4, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=256, copy_bytes=2**20)
    writer = Writer(
        current(device), method=method(device, options.rounds), ceilings=(ceiling[0], None), results=options.out
    )
    for formula in formulas(seqlen, heads, device):
        if not options.wants(formula.name.split()[0]):
            continue
        shape = (batch, seqlen, heads, head_dim)
        pairs = visible_pairs(formula.mask, seqlen, device)
        problem = {
            "batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_q": heads, "num_heads_kv": heads,
            "head_dim": head_dim, "causal": formula.causal, "dtype": str(dtype).removeprefix("torch."),
            "formula": formula.name, "visible": round(pairs / seqlen**2, 6),
        }  # fmt: skip
        q, k, v, do = _inputs("", shape, dtype, device)
        want = head_slice(q, k, v, do, mask=formula.mask, score=formula.score, batch=HEAD[0], head=HEAD[1])
        del q, k, v, do
        _measure(formula, shape, dtype, 4 * head_dim * pairs * batch * heads, problem, want, writer, options)


def _measure(
    formula: Formula,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    operations: int,
    problem: dict[str, Any],
    want: Slice,
    writer: Writer,
    options: Options,
) -> None:
    device = options.device
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    errors: dict[str, tuple[float, float]] = {}
    broken: dict[str, str] = {}
    for name, attention in contenders(formula, shape[1], device).items():
        q, k, v, do = _inputs(name, shape, dtype, device)
        forward[name] = lambda a=attention, q=q, k=k, v=v: a(q, k, v)
        try:
            o = attention(q, k, v)
            got = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        except Exception as error:
            broken[name] = failure_message(error)
            backward[name] = lambda message=broken[name]: _fail(message)
            continue
        backward[name] = lambda o=o, q=q, k=k, v=v, do=do: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        pick = [t[HEAD[0], :, HEAD[1]] for t in (o.detach(), *got)]
        measured = [relative_error(t, w) for t, w in zip(pick, (want.o, want.dq, want.dk, want.dv), strict=True)]
        errors[name] = (measured[0], max(measured[1:]))
    includes = {
        "attention_forward": "the whole call, inputs that require gradients; flex: block mask built beforehand",
        "attention_backward": "torch.autograd.grad of q, k, v from a saved forward",
    }
    for direction, (question, calls) in enumerate((("attention_forward", forward), ("attention_backward", backward))):
        for name, timed in interleaved(calls, device=device, rounds=options.rounds).items():
            times = timed.quantiles
            outcome: dict[str, Any] | None = {"metric": "failure", "message": timed.failure} if timed.failure else None
            if outcome is None and name in errors:
                outcome = {
                    "metric": "relative l2 to float64, one head",
                    "value": float(f"{errors[name][direction]:.3g}"),
                }
            writer.write(
                question,
                problem,
                name,
                times_ms=times,
                tflops=operations * (1, 2.5)[direction] / times[1] / 1e9 if times else None,
                error=outcome,
                includes=includes[question],
                sources=FAMILIES["attention_triton"].hash() if name.startswith("tilewise.") else None,
            )


def _fail(message: str) -> None:
    raise RuntimeError(message)
