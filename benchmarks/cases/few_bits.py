"""Questions `few_bits_forward` and `few_bits_encode`: attention whose q, k and v become codes, and making the codes.

Forward, bf16, 16,384 tokens in all, heads times head_dim 2048, full and causal, lengths 1024 to 16,384 (parts d64 and
d128): whole calls of `attention(quantize=)` and, `.kernel`, its kernel with codes that are there, beside our exact
kernel, cuDNN's and SageAttention 1.0 (package sageattention) where that imports. TFLOP/s count the visible area. Errors
are those to exact attention in float64.

Encoding (part encode): `quantize_qkv` of 16,384 tokens, replayed from a CUDA graph so that no launch comes late, GB/s
of the fewest bytes, q, k and v read once and what it makes written once, beside the copy rate of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.contenders import HEAD, SDPA_BACKENDS, find_peer, inputs, sdpa, sources_of
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import head_slice, relative_error
from benchmarks.timing import TURN_MS, TURNS, Call, ceilings, graphed, interleaved, method
from tilewise.ops.attention.problem import make_call
from tilewise.quant.schemes import Scheme

FORWARD, ENCODE = QUESTIONS = ("few_bits_forward", "few_bits_encode")
INCLUDES = {
    "kernel": "the kernel; codes are there",
    "": "the whole call, without gradients; codes are made",
    "encode": "quantize_qkv of q, k and v, replayed from a CUDA graph",
}
METRIC = "relative l2 to exact attention in float64, one head"
SCHEMES: dict[str, Scheme] = {
    "sage2": tw.Sage2(),
    "sage_blocks": tw.Sage(v_scale="block"),
    "sage2_rotated": tw.Sage(rotate="hadamard"),
    "fp8": tw.Sage("fp8"),
    "fp8_rotated": tw.Sage("fp8", rotate="hadamard"),
    "fa3": tw.FP8(v_scale="channel"),
    "blocks": tw.FP8("block", "block", "block"),
    "int8_blocks": tw.Sage(q_scale="block", k_scale="block", v_scale="block", smooth=()),
}


def run(options: Options) -> None:
    """Measure what is wanted: parts d64, d128 and encode."""
    device, rounds = options.device, min(options.rounds, TURNS)
    sage, says = find_peer("sage1", "sageattention", "sageattention", device)
    print(says, flush=True)
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    writer = Writer(
        current(device),
        method=f"{method(device, rounds, turn_ms=TURN_MS)}; {says}",
        ceilings=ceiling,
        results=options.out,
    )
    tokens, width, lengths = (16_384, 2048, (1024, 2048, 4096, 16_384)) if not options.quick else (256, 512, (128,))
    for head_dim in (64, 128):
        if options.wants(f"d{head_dim}"):
            for causal in (False, True):
                for seqlen in lengths:
                    shape = (tokens // seqlen, seqlen, width // head_dim, head_dim)
                    _forward(shape, causal, writer, device, rounds, sage)
        if options.wants("encode"):
            _encode((1, tokens, width // head_dim, head_dim), writer, device, rounds)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _forward(
    shape: tuple[int, int, int, int], causal: bool, writer: Writer, device: str, rounds: int, sage: Any
) -> None:
    dtype = _dtype(device)
    q, k, v, do = inputs(shape, dtype, device)
    want = head_slice(
        q, k, v, do, mask=(lambda b, h, i, j: i >= j) if causal else None, score=None, batch=HEAD[0], head=HEAD[1]
    ).o
    q, k, v = (x.detach() for x in (q, k, v))
    batch, seqlen, heads, head_dim = shape
    pairs = seqlen * (seqlen + 1) // 2 if causal else seqlen * seqlen
    calls = _contenders(q, k, v, causal, device, sage)
    timed = interleaved(calls, device=device, rounds=rounds, turn_ms=TURN_MS)
    problem = {
        "operation": f"head_dim {head_dim}", "formula": "causal" if causal else "full", "seqlen_q": seqlen,
        "seqlen_k": seqlen, "batch": batch, "num_heads_q": heads, "num_heads_kv": heads, "head_dim": head_dim,
        "dtype": str(dtype)[6:],
    }  # fmt: skip
    for name, result in timed.items():
        times = result.quantiles
        outcome: dict[str, Any] = {"metric": "failure", "message": result.failure}
        if times:
            o: Any = calls[name]()
            value = relative_error((o[0] if isinstance(o, tuple) else o)[HEAD[0], :, HEAD[1]], want)
            outcome = {"metric": METRIC, "value": float(f"{value:.3g}")}
        writer.write(
            FORWARD, problem, name, times_ms=times,
            tflops=4 * head_dim * pairs * batch * heads / times[1] / 1e9 if times else None,
            error=outcome, includes=INCLUDES["kernel" if name.endswith(".kernel") else ""], sources=sources_of(name),
        )  # fmt: skip


def _contenders(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, device: str, sage: Any
) -> dict[str, Call]:
    mask = tw.causal if causal else None
    exact, row = ("hopper", "hopper_codes") if device == "cuda" else ("cpu_tiled", "cpu_codes")
    found: dict[str, Call] = {f"tilewise.{exact}": lambda: tw.attention(q, k, v, mask=mask, impl=exact)}
    for name, scheme in SCHEMES.items():
        found[f"tilewise.{row}.{name}"] = _whole(q, k, v, mask, scheme, row)
        if device == "cuda":
            found[f"tilewise.{row}.{name}.kernel"] = _kernel(q, k, v, mask, scheme)
    for name, backend in SDPA_BACKENDS[device].items():
        if name != "fa2":
            found[name] = _sdpa(sdpa(backend, causal), q, k, v)
    if sage is not None:
        found["sage1"] = lambda: sage.sageattn(q, k, v, tensor_layout="NHD", is_causal=causal)
    return found


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scheme: Scheme, row: str) -> Call:
    return lambda: tw.attention(q, k, v, mask=mask, quantize=scheme, impl=row)


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scheme: Scheme) -> Call:
    from tilewise.ops.attention.gluon_codes import of_codes

    x, call = tw.quantize_qkv(q, k, v, scheme=scheme), make_call(q, k, v, mask=mask, quantize=scheme)
    return lambda: of_codes(x, call)


def _sdpa(attention: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Call:
    return lambda: attention(*tensors)


def _encode(shape: tuple[int, int, int, int], writer: Writer, device: str, rounds: int) -> None:
    dtype = _dtype(device)
    q, k, v = (x.detach() for x in inputs(shape, dtype, device)[:3])
    row = "triton" if device == "cuda" else "cpu"
    for name, scheme in SCHEMES.items():
        call = {f"tilewise.{row}": graphed(_encoding(q, k, v, scheme, row), device)}
        (impl, result), *_ = interleaved(call, device=device, rounds=rounds, turn_ms=TURN_MS).items()
        times = result.quantiles
        fewest = sum(x.nbytes for x in (q, k, v)) + tw.quantize_qkv(q, k, v, scheme=scheme).nbytes
        problem = {"operation": name, "shape": " × ".join(f"{n:,}" for n in shape[1:]), "dtype": str(dtype)[6:]}
        writer.write(
            ENCODE, problem, impl, times_ms=times, gbps=fewest / times[1] / 1e6 if times else None,
            includes=INCLUDES["encode"], sources=sources_of(impl, "quantize"),
        )  # fmt: skip


def _encoding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scheme: Scheme, row: str) -> Call:
    return lambda: tw.quantize_qkv(q, k, v, scheme=scheme, impl=row)
