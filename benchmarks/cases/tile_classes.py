"""Question `tile_classes`: EMPTY, PARTIAL or FULL for 128 x 128 tiles of causal & window & document.

Contenders: `TileMap.build` on the GPU and on the CPU, FlexAttention's `create_block_mask`, plain and compiled. The
128k x 128k problem is the one that counts; at 16k x 16k every contender fits in memory everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.environment import current
from benchmarks.memory import cpu_peak_mib, gpu_peak_mib
from benchmarks.records import Writer
from benchmarks.timing import failure_message, interleaved, method
from tilewise.schedule.tilemap import TileMap
from tools.families import FAMILIES

WINDOW, DOCUMENTS, BLOCK = 4096, 32, 128
CPU_DENSE_LIMIT = 4 * 2**30  # bytes of the dense mask above which plain create_block_mask is not tried on the CPU
Call = Callable[[], object]


def _ids(seqlen: int, device: str) -> torch.Tensor:
    """Documents of unequal lengths: the square roots of 1..32 as shares, none a multiple of a tile."""
    shares = torch.arange(1, DOCUMENTS + 1, dtype=torch.float64).sqrt().cumsum(0)
    bounds = (shares / shares[-1] * seqlen).long()
    return torch.searchsorted(bounds, torch.arange(seqlen), right=True).clamp(max=DOCUMENTS - 1).to(device, torch.int32)


def _contenders(seqlen: int, device: str) -> dict[str, Call]:
    ids = _ids(seqlen, device)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < WINDOW) & (ids[i] == ids[j])

    compiled: Any = torch.compile(create_block_mask)

    def ours() -> object:
        mask = tw.causal & tw.window(WINDOW) & tw.document(ids)
        return TileMap.build(mask, seqlen_q=seqlen, seqlen_k=seqlen, block_m=BLOCK, block_n=BLOCK, device=device)

    return {
        "tilewise": ours,
        "flex": lambda: create_block_mask(visible, None, None, seqlen, seqlen, device=device, BLOCK_SIZE=BLOCK),
        "flex_compiled": lambda: compiled(visible, None, None, seqlen, seqlen, device=device, BLOCK_SIZE=BLOCK),
    }


def prepare_cpu(name: str, seqlen: int) -> tuple[Call, Call]:
    """For the memory measurement in a fresh process: a small call that loads the code, and the call."""
    return _contenders(4 * BLOCK, "cpu")[name], _contenders(seqlen, "cpu")[name]


def run(options: Options) -> None:
    """Time and peak memory of every contender, on the GPU if there is one and on the CPU."""
    sizes = (16384, 131072) if not options.quick else (1024, 2048)
    for seqlen in sizes:
        for device in ("cuda", "cpu") if options.device == "cuda" else ("cpu",):
            if options.wants(device):
                _measure(seqlen, device, options)


def _measure(seqlen: int, device: str, options: Options) -> None:
    rounds = options.rounds if device == "cuda" else min(options.rounds, 5)
    writer = Writer(current(options.device), method=method(device, rounds), ceilings=(None, None), results=options.out)
    problem = {
        "formula": f"causal & window({WINDOW}) & document, {DOCUMENTS} documents", "seqlen_q": seqlen,
        "seqlen_k": seqlen, "block_m": BLOCK, "block_n": BLOCK, "batch": 1, "num_heads_q": 1,
        "on": "gpu" if device == "cuda" else "cpu",
    }  # fmt: skip
    calls = _contenders(seqlen, device)
    failures = {}
    peaks: dict[str, float] = {}
    for name in list(calls):
        if device == "cpu" and name == "flex" and seqlen * seqlen > CPU_DENSE_LIMIT:
            failures[name] = f"not tried: its dense mask alone takes {seqlen * seqlen / 1e9:.1f} GB"
        else:
            try:
                if device == "cuda":
                    calls[name]()
                peaks[name] = gpu_peak_mib(calls[name]) if device == "cuda" else cpu_peak_mib(prepare_cpu, name, seqlen)
            except Exception as error:
                failures[name] = failure_message(error)
                if device == "cuda":
                    torch.cuda.empty_cache()
        if name in failures:
            del calls[name]
    timed = interleaved(calls, device=device, rounds=rounds)
    for name in ("tilewise", "flex", "flex_compiled"):
        failure = failures.get(name) or timed[name].failure
        writer.write(
            "tile_classes",
            problem,
            name,
            times_ms=None if failure else timed[name].quantiles,
            error={"metric": "failure", "message": failure} if failure else None,
            includes="from the formula to the classes on that device; flex_compiled: compiled before the clock starts",
            sources=FAMILIES["tilemap"].hash() if name == "tilewise" else None,
            peak_mib=None if failure else peaks[name],
        )
