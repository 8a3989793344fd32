"""Timing for `tilewise bench`: attention through the library and through PyTorch, forward and backward, and what any
timing of calls needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

import tilewise
from tilewise.explain.neighbours import Outputs, outputs_of

FLUSH_BYTES = 256 * 1024 * 1024  # larger than any L2 cache of the GPU table
WAIT_CYCLES = 600_000  # some 0.3 ms, in which the host gets through most calls


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; head_dim_v is head_dim."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int


@dataclass(frozen=True)
class Cell:
    """One row of the table. `speedup` is PyTorch's median over this one's; `difference` is from PyTorch's result."""

    shape: Shape
    direction: str
    impl: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    repeats: int
    tflops: float
    speedup: float
    difference: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def repeat(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of repeated calls within about `seconds` (at least 5), sorted, after a warm-up a quarter as long."""

    def clock(call: Callable[[], object], count: int) -> list[float]:
        return _events(call, count, device) if device.type == "cuda" else _wall(call, count)

    began = time.perf_counter()
    warm: list[float] = []
    while len(warm) < 2 or time.perf_counter() - began < seconds / 4:
        warm += clock(call, 1)
    count = max(5, min(1000, int(seconds * 1e3 / max(min(warm), 1e-3))))
    return sorted(clock(call, count))


def _wall(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _events(call: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Events around each call, the L2 cache filled before it by a read and the GPU kept waiting until the host is
    ahead, so that no time holds a launch that came late.
    """
    flush = torch.zeros(FLUSH_BYTES // 4, device=device)
    event: Any = torch.cuda.Event
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
    for start, stop in pairs:
        flush.sum()  # a write would leave what the call's first reads had to write back
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return [float(start.elapsed_time(stop)) for start, stop in pairs]


Timed = tuple[Callable[[], object], Outputs]


def forward_of(function: Callable[[], Any]) -> Timed:
    """A call without gradients, and what it gives, float32."""

    def call() -> Any:
        with torch.no_grad():
            return function()

    return call, tuple(x.float() for x in outputs_of(call()))


def backward_of(function: Callable[[], Any], inputs: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Timed:
    """A call of the backward alone, from a saved forward, and the gradients of `inputs`, float32."""
    outputs = outputs_of(function())

    def call() -> Outputs:
        return torch.autograd.grad(outputs, inputs, incoming, retain_graph=True)

    return call, tuple(gradient.float() for gradient in call())


def apart(ours: Outputs, theirs: Outputs) -> float:
    """The largest difference of two results."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def quantiles(ms: Sequence[float]) -> tuple[float, float, float]:
    """(p20, p50, p80) of sorted times."""
    p20, p50, p80 = (ms[min(len(ms) - 1, int(share * len(ms)))] for share in (0.2, 0.5, 0.8))
    return p20, p50, p80


def copy_rate(device: torch.device, seconds: float) -> float:
    """GB/s of a copy that no cache holds, bytes read and bytes written."""
    source = torch.ones(FLUSH_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * FLUSH_BYTES / quantiles(repeat(lambda: target.copy_(source), device, seconds))[1] / 1e6


def visible(mask: tilewise.Mask, shape: Shape, device: torch.device) -> torch.Tensor:
    """The mask as a dense boolean tensor (1 or batch, 1 or num_heads_q, seqlen_q, seqlen_k)."""

    def axis(length: int, dim: int, start: int = 0) -> torch.Tensor:
        return torch.arange(start, start + length, device=device).view([-1 if n == dim else 1 for n in range(4)])

    shift = shape.seqlen_k - shape.seqlen_q
    symbols: dict[str, Any] = {"b": axis(shape.batch, 0), "h": axis(shape.num_heads_q, 1)}
    dense = mask.evaluate(**symbols, i=axis(shape.seqlen_q, 2, shift), j=axis(shape.seqlen_k, 3))
    return dense.bool().expand(*dense.shape[:2], shape.seqlen_q, shape.seqlen_k).contiguous()


def measure(
    shape: Shape,
    mask: tilewise.Mask | None,
    directions: Sequence[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    impl: str | None,
    seconds: float,
    generator: torch.Generator,
) -> list[Cell]:
    """Time both contenders in each of `directions`; `seconds` for each cell. `generator` lives on `device`."""

    def random(seqlen: int, heads: int) -> torch.Tensor:
        size = (shape.batch, seqlen, heads, shape.head_dim)
        return torch.randn(size, dtype=dtype, device=device, generator=generator).requires_grad_()

    q = random(shape.seqlen_q, shape.num_heads_q)
    k, v = random(shape.seqlen_k, shape.num_heads_kv), random(shape.seqlen_k, shape.num_heads_kv)
    do = torch.randn(q.shape, dtype=dtype, device=device, generator=generator)
    square_causal = mask is not None and mask == tilewise.causal and shape.seqlen_q == shape.seqlen_k
    dense = None if mask is None or square_causal else visible(mask, shape, device)

    def ours() -> torch.Tensor:
        return tilewise.attention(q, k, v, mask=mask, impl=impl)

    def torchs() -> torch.Tensor:
        heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        o = F.scaled_dot_product_attention(*heads_first, attn_mask=dense, is_causal=square_causal, enable_gqa=True)
        return o.transpose(1, 2)

    chosen = tilewise.why(q, k, v, mask=mask, impl=impl).chosen
    contenders = ((f"tilewise.{chosen}", ours), ("torch", torchs))
    cells = []
    for direction in directions:
        results, times = [], []
        for _, attend in contenders:
            call, result = forward_of(attend) if direction == "forward" else backward_of(attend, (q, k, v), (do,))
            results.append(result)
            times.append(repeat(call, device, seconds))
        flops = _pairs(mask, dense, shape) * shape.head_dim * (4 if direction == "forward" else 10)
        difference = apart(*results)
        for n, ((name, _), ms) in enumerate(zip(contenders, times, strict=True)):
            p20, p50, p80 = quantiles(ms)
            speedup = times[1][len(times[1]) // 2] / p50
            cells.append(
                Cell(
                    shape,
                    direction,
                    name,
                    p20,
                    p50,
                    p80,
                    len(ms),
                    flops / p50 / 1e9,
                    speedup,
                    None if n else difference,
                )
            )
    return cells


def _pairs(mask: tilewise.Mask | None, dense: torch.Tensor | None, shape: Shape) -> int:
    """Visible (query, key) pairs of all batches and heads."""
    everything = shape.batch * shape.num_heads_q
    if dense is not None:
        return int(dense.sum()) * everything // (dense.shape[0] * dense.shape[1])
    if mask is None:
        return everything * shape.seqlen_q * shape.seqlen_k
    return everything * shape.seqlen_q * (shape.seqlen_q + 1) // 2
