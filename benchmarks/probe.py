"""Run in a process of its own by benchmarks/cases/overhead.py: time to a first result, and compilations per change.

`python -m benchmarks.probe first_result|first_call|compilations tilewise|flex` prints one JSON object. Caches are
wherever the environment (TRITON_CACHE_DIR, TILEWISE_CACHE, TORCHINDUCTOR_CACHE_DIR) says.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

SEQLEN, HEADS, HEAD_DIM = 1024, 4, 64
Attention = Callable[..., torch.Tensor]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _qkv(seqlen: int = SEQLEN) -> list[torch.Tensor]:
    """(batch, heads, seqlen, head_dim) for flex; its transpose is what tilewise takes."""
    dtype = torch.float16 if _device() == "cuda" else torch.float32
    return [torch.randn(1, HEADS, seqlen, HEAD_DIM, device=_device()).to(dtype) for _ in range(3)]


def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(1, SEQLEN, (1,), device=_device()), torch.rand(HEADS, device=_device())


def _tilewise() -> Attention:
    """The formula's call; with left = 0 attention without a formula."""
    import tilewise as tw

    def run(
        left: int, slope: float, prefix: torch.Tensor, slopes: torch.Tensor, qkv: list[torch.Tensor]
    ) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in qkv)
        impl = "triton" if _device() == "cuda" else None
        if not left:
            return tw.attention(q, k, v, impl=impl)
        return tw.attention(
            q,
            k,
            v,
            mask=lambda b, h, i, j: ((i >= j) & (i - j < left)) | (j < prefix[b]),
            score=lambda s, b, h, i, j: s + slopes[h] * slope * (j - i),
            impl=impl,
        )

    return run


def _flex() -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def run(
        left: int, slope: float, prefix: torch.Tensor, slopes: torch.Tensor, qkv: list[torch.Tensor]
    ) -> torch.Tensor:
        seqlen = qkv[0].shape[2]
        if not left:
            return compiled(*qkv)
        mask = create_block_mask(
            lambda b, h, i, j: ((i >= j) & (i - j < left)) | (j < prefix[b]), 1, None, seqlen, seqlen, device=_device()
        )
        return compiled(*qkv, score_mod=lambda s, b, h, i, j: s + slopes[h] * slope * (j - i), block_mask=mask)

    return run


def _settle() -> None:
    if _device() == "cuda":
        torch.cuda.synchronize()


def first_call(attention: Attention) -> dict[str, Any]:
    """Seconds from the call to its result on the host; imports and the CUDA context came before."""
    prefix, slopes = _tables()
    qkv = _qkv()
    (qkv[0] @ qkv[1].transpose(-1, -2)).sum().item()
    start = time.perf_counter()
    attention(64, 0.5, prefix, slopes, qkv).float().sum().item()
    return {"seconds": time.perf_counter() - start}


def first_result(attention: Attention) -> dict[str, Any]:
    """The same in a process that has run attention before, with another formula."""
    prefix, slopes = _tables()
    attention(0, 0.0, prefix, slopes, _qkv()).float().sum().item()
    return first_call(attention)


def compilations(attention: Attention) -> dict[str, Any]:
    """Triton compilations plus torch.compile graphs: first call, then after a change of number, tensor or length."""
    import triton
    from torch._dynamo.utils import counters

    count = 0

    def listener(**_: Any) -> None:
        nonlocal count
        count += 1

    triton.knobs.compilation.listener = listener
    prefix, slopes = _tables()
    found = {}
    changes: dict[str, Callable[[], torch.Tensor]] = {
        "first call": lambda: attention(64, 0.5, prefix, slopes, _qkv()),
        "same call": lambda: attention(64, 0.5, prefix, slopes, _qkv()),
        "number": lambda: attention(100, 0.25, prefix, slopes, _qkv()),
        "tensor": lambda: attention(64, 0.5, *_tables(), _qkv()),
        "length": lambda: attention(64, 0.5, prefix, slopes, _qkv(1536)),
        "odd length": lambda: attention(64, 0.5, prefix, slopes, _qkv(1001)),
    }
    for name, call in changes.items():
        before = count + counters["stats"]["unique_graphs"]
        call()
        _settle()
        found[name] = count + counters["stats"]["unique_graphs"] - before
    return found


def main() -> int:
    """Print the answer of one probe as JSON on the last line."""
    probe = {"first_result": first_result, "first_call": first_call, "compilations": compilations}[sys.argv[1]]
    torch.manual_seed(0)
    print(json.dumps(probe({"tilewise": _tilewise, "flex": _flex}[sys.argv[2]]())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
