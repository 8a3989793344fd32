"""What the cases that compare attention share: inputs, contenders' calls, and measuring them forward and backward.

Every contender takes and returns (batch, seqlen, heads, head_dim), or (total, heads, head_dim) when packed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from benchmarks.environment import version
from benchmarks.records import Writer
from benchmarks.reference import Slice, relative_error
from benchmarks.timing import Call, Timed, failure_message, interleaved
from tilewise.core.errors import UnsupportedError
from tools.families import family_of

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HEAD = (-1, 3)  # (batch, head) of the slice that errors are taken on
SDPA_BACKENDS = {
    "cuda": {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION},
    "cpu": {"sdpa": SDPBackend.FLASH_ATTENTION},
}
INCLUDES = (
    "the whole call, inputs that require gradients",
    "torch.autograd.grad of q, k, v from a saved forward",
)


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, *, heads_kv: int | None = None, heads_first: bool = False
) -> list[torch.Tensor]:
    """q, k, v, do with the same values for all; `heads_first` lets them lie in memory with heads before seqlen."""
    generator = torch.Generator(device).manual_seed(0)
    shape_kv = (*shape[:-2], heads_kv or shape[-2], shape[-1])
    made = [torch.randn(s, generator=generator, device=device).to(dtype) for s in (shape, shape_kv, shape_kv, shape)]
    if heads_first:
        made = [t.transpose(-3, -2).contiguous().transpose(-3, -2) for t in made]
    return [t.requires_grad_(index < 3) for index, t in enumerate(made)]


def tilewise(row: str, **arguments: Any) -> Attention:
    """One row of our dispatch table; raises UnsupportedError for what it cannot run."""
    return lambda q, k, v: tw.attention(q, k, v, impl=row, **arguments)


def sdpa(backend: SDPBackend, causal: bool) -> Attention:
    """One back end of PyTorch's scaled_dot_product_attention."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[2] != k.shape[2]
        with sdpa_kernel([backend]):
            o = F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return run


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views (batch, heads, seqlen, head_dim)."""
    return [t.transpose(1, 2) for t in tensors]


def has_torch_varlen(device: str) -> bool:
    """Whether this PyTorch has attention over packed sequences (2.10 or newer, on a GPU)."""
    return device == "cuda" and importlib.util.find_spec("torch.nn.attention.varlen") is not None


def torch_varlen(causal: bool, packed: tuple[torch.Tensor, int]) -> Attention:
    """PyTorch's own attention over packed sequences, its FlashAttention-2; `packed` as for `fa4`."""
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    cu_seqlens, longest = packed
    # PyTorch 2.10 has is_causal, later ones a window
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    arguments: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)} if by_window else {"is_causal": causal}
    return lambda q, k, v: _output(varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **arguments))


def find_peer(name: str, module: str, package: str, device: str) -> tuple[Any, str]:
    """A peer's module or None, and for the record its version or why it is missing."""
    if device != "cuda":
        return None, f"{name} left out: no kernels for {device}"
    try:
        return importlib.import_module(module), f"{name} is {package} {version(package)}"
    except Exception as error:
        print(f"{module}: {failure_message(error)}", flush=True)
        absent = isinstance(error, ModuleNotFoundError) and str(error.name).startswith(module.split(".")[0])
        # without the message, which may name places of this machine
        return None, f"{name} left out: {'not installed' if absent else f'its import raised {type(error).__name__}'}"


def find_fa4(device: str) -> tuple[Any, str]:
    """FlashAttention-4's module (package flash-attn-4) or None, and for the record its version or why it is missing."""
    return find_peer("fa4", "flash_attn.cute", "flash-attn-4", device)


def fa4(module: Any, causal: bool, packed: tuple[torch.Tensor, int] | None = None) -> Attention:
    """FlashAttention-4; `packed` is (cu_seqlens, the longest length)."""
    if packed is None:
        return lambda q, k, v: _output(module.flash_attn_func(q, k, v, causal=causal))
    cu_seqlens, longest = packed
    arguments = {
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip
    return lambda q, k, v: _output(module.flash_attn_varlen_func(q, k, v, causal=causal, **arguments))


def _output(result: Any) -> torch.Tensor:
    """Some versions return (o, lse)."""
    o: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return o


def sources_of(impl: str, operation: str = "attention") -> str | None:
    """Hash of the kernel family of `tilewise.<row>` or `tilewise.<row>.<variant>`; None for contenders not ours."""
    ours, *row = impl.split(".")
    family = family_of(row[0], operation) if ours == "tilewise" else None
    return family.hash() if family else None


@dataclass(frozen=True)
class Comparison:
    """One problem that contenders are compared on: its record, forward operations of visible pairs, and reference."""

    problem: dict[str, Any]
    operations: int
    want: Slice


@dataclass(frozen=True)
class _Passes:
    """What of one contender can be timed: forward and backward, as far as they ran, and the errors of what they gave.

    `failure` is what stopped it there, `applies` False where it said itself that the call is not for it.
    """

    calls: list[Call]
    errors: list[float]
    failure: str | None = None
    applies: bool = True


def measure(
    comparison: Comparison,
    contenders: Mapping[str, Attention],
    make: Callable[[str], list[torch.Tensor]],
    questions: Mapping[str, str],
    writer: Writer,
    *,
    device: str,
    rounds: int,
    turn_ms: float = 0.0,
    sources: Callable[[str], str | None] = sources_of,
    recorded: bool = True,
) -> None:
    """Time forward, then backward, contenders taking turns; one record per contender and pass.

    `make` gives a contender's q, k, v, do; `questions` are the forward's and the backward's, with what a time includes;
    unless `recorded`, the forward that is timed is one without gradients.
    """
    passes = {name: _passes(attention, make(name), comparison.want, recorded) for name, attention in contenders.items()}
    for direction, (question, includes) in enumerate(questions.items()):
        calls = {name: found.calls[direction] for name, found in passes.items() if direction < len(found.calls)}
        timed = interleaved(calls, device=device, rounds=rounds, turn_ms=turn_ms)
        for name, found in passes.items():
            result = timed.get(name) or Timed([], found.failure)
            times = result.quantiles
            writer.write(
                question,
                comparison.problem,
                name,
                times_ms=times,
                tflops=comparison.operations * (1, 2.5)[direction] / times[1] / 1e9 if times else None,
                error=_outcome(found, direction, result),
                includes=includes,
                sources=sources(name),
            )


def _passes(attention: Attention, tensors: list[torch.Tensor], want: Slice, recorded: bool) -> _Passes:
    q, k, v, do = tensors
    timed = [t if recorded else t.detach() for t in (q, k, v)]
    calls: list[Call] = []
    errors: list[float] = []
    try:
        o = attention(q, k, v)
        errors.append(_error([o.detach()], [want.o], group=1))
        calls.append(lambda: attention(*timed))
        grads = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        errors.append(_error(grads, [want.dq, want.dk, want.dv], group=q.shape[-2] // k.shape[-2]))
        calls.append(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    except Exception as error:
        return _Passes(calls, errors, failure_message(error), not isinstance(error, UnsupportedError))
    return _Passes(calls, errors)


def _error(got: Any, want: list[torch.Tensor], *, group: int) -> float:
    """The largest relative error of o, or of dq, dk and dv, on one head; raises where it is no number."""
    batch, head = HEAD
    heads = (head, head // group, head // group)
    one = [(t if t.ndim == 3 else t[batch])[:, h] for t, h in zip(got, heads, strict=False)]
    errors = [relative_error(t, w) for t, w in zip(one, want, strict=True)]
    if not all(map(math.isfinite, errors)):
        raise ArithmeticError(f"relative errors to float64 are {errors}")
    return max(errors)


def _outcome(found: _Passes, direction: int, result: Timed) -> dict[str, Any]:
    if result.failure:
        return {"metric": "failure" if found.applies else "not applicable", "message": result.failure}
    return {"metric": "relative l2 to float64, one head", "value": float(f"{found.errors[direction]:.3g}")}
