"""Speed of the Hopper row beside cuDNN while a kernel changes: `python -m tools.time_rows PART...` on a GPU.

Contenders take turns call by call (benchmarks/timing.py); medians of 15 rounds, no records. Parts: f forward and b
backward of the grid, g GQA and packed, d deterministic beside default, m formulas beside causal, k microseconds of each
kernel of one backward. TFLOP/s of the visible area: 4 * head_dim a pair forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases import attention_formula
from benchmarks.cases.exact_grid import ROWS, Cell, cells, contenders
from benchmarks.contenders import Attention, find_fa4, inputs, tilewise
from benchmarks.reference import visible_pairs
from benchmarks.timing import failure_message, interleaved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TRITON, HOPPER = (f"tilewise.{row}" for row in ROWS[DEVICE])
SHORT = {HOPPER: "hopper", TRITON: "triton", f"{HOPPER}.deterministic": "determ."}
DIRECTIONS = ("forward", "backward")
Call = Callable[[], object]
Given = argparse.Namespace


def prepared(attention: Attention, tensors: list[torch.Tensor], direction: int) -> Call:
    """The call to time; it has run once."""
    q, k, v, do = tensors
    o = attention(q, k, v)
    if direction == 0:
        return lambda: attention(q, k, v)
    torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def timed(calls: dict[str, Call]) -> dict[str, float]:
    """Median milliseconds."""
    found = interleaved(calls, device=DEVICE, rounds=15, warmup_ms=10)
    for name, result in found.items():
        if result.failure:
            print(f"    {name}: {result.failure[:110]}")
    return {name: result.quantiles[1] for name, result in found.items() if result.quantiles}


def rates(what: str, who: dict[str, Attention], shape: dict[str, Any], operations: float, direction: int) -> None:
    """One line: milliseconds of the first contender, TFLOP/s of all, and how the first does beside the others."""
    calls: dict[str, Call] = {}
    for name, attention in who.items():
        try:
            calls[name] = prepared(attention, inputs(device=DEVICE, dtype=DTYPE, **shape), direction)
        except Exception as problem:
            print(f"    {SHORT.get(name, name)}: {failure_message(problem)[:110]}")
    ms = timed(calls)
    tflops = {name: operations * (1, 2.5)[direction] / t / 1e9 for name, t in ms.items()}
    first = next(iter(who))
    text = "".join(
        f"{SHORT.get(n, n):>9} {tflops[n]:6.1f}" if n in tflops else f"{SHORT.get(n, n):>9}      -" for n in who
    )
    beside = " ".join(
        f"{SHORT.get(n, n)} x{tflops[first] / tflops[n]:.3f}" for n in list(who)[1:] if n in tflops and first in tflops
    )
    print(f"{DIRECTIONS[direction]:<8} {what:<26} {ms.get(first, 0):8.3f} ms {text}   {beside}", flush=True)


def label(cell: Cell) -> str:
    length = f"{sum(cell.lengths)}" if cell.packed else f"{cell.lengths[0]}"
    return f"{cell.part} {'causal' if cell.causal else 'full'} {length}"


def grid(given: Given, parts: tuple[str, ...] | None = None) -> list[Cell]:
    """The cells that the options leave."""
    return [
        cell
        for cell in cells(given.tiny)
        if (cell.part in parts if parts else cell.part.startswith("d"))
        and (parts or not given.dims or cell.head_dim in given.dims)
        and (parts or not given.seqlens or cell.lengths[0] in given.seqlens)
        and (not given.masks or ("causal" if cell.causal else "full") in given.masks)
    ]


def operations_of(cell: Cell) -> int:
    return 4 * cell.head_dim * cell.pairs * cell.heads_q


def compare(cell: Cell, given: Given, direction: int) -> None:
    """Ours beside the peers."""
    found = contenders(cell, DEVICE, given.fa4)
    wanted = [HOPPER, *([TRITON] if given.triton else []), "cudnn", "sdpa", "torch_varlen", "fa4"]
    rates(
        label(cell), {n: found[n] for n in wanted if n in found},
        {"shape": cell.shape, "heads_kv": cell.heads_kv}, operations_of(cell), direction,
    )  # fmt: skip


def forward(given: Given) -> None:
    for cell in grid(given):
        compare(cell, given, 0)


def backward(given: Given) -> None:
    for cell in grid(given):
        compare(cell, given, 1)


def grouped(given: Given) -> None:
    for cell in grid(given, ("gqa", "packed")):
        for direction in (0, 1):
            compare(cell, given, direction)


def deterministic(given: Given) -> None:
    given.dims = given.dims or ([64, 128] if not given.tiny else [])
    for cell in grid(given):
        mask = tw.causal if cell.causal else None
        row = ROWS[DEVICE][-1]
        who = {
            f"{HOPPER}.deterministic": tilewise(row, mask=mask, deterministic=True),
            HOPPER: tilewise(row, mask=mask),
        }
        rates(label(cell), who, {"shape": cell.shape}, operations_of(cell), 1)


def formulas(given: Given) -> None:
    """All formulas take turns, so that each is beside causal."""
    seqlen, heads, head_dim = (8192, 16, 128) if not given.tiny else (256, 4, 32)
    batch = attention_formula.BATCH
    for row in [ROWS[DEVICE][-1], *([ROWS[DEVICE][0]] if given.triton else [])]:
        for direction in (0, 1):
            calls, operations = {}, {}
            for formula in attention_formula.formulas(seqlen, heads, DEVICE):
                mask, score = formula.ours
                tensors = inputs((batch, seqlen, heads, head_dim), DTYPE, DEVICE)
                try:
                    calls[formula.name] = prepared(tilewise(row, mask=mask, score=score), tensors, direction)
                except Exception as problem:
                    print(f"    {formula.name}: {failure_message(problem)[:110]}")
                    continue
                pairs = visible_pairs(formula.mask, seqlen, DEVICE)
                operations[formula.name] = 4 * head_dim * pairs * batch * heads * (1, 2.5)[direction]
            ms = timed(calls)
            tflops = {name: operations[name] / t / 1e9 for name, t in ms.items()}
            plain = tflops.get("causal")
            for name, rate in tflops.items():
                beside = f"of causal {rate / plain:5.3f}" if plain else ""
                print(f"{DIRECTIONS[direction]:<8} {row} {name:<16} {ms[name]:8.3f} ms {rate:6.1f} TFLOP/s  {beside}")
            sys.stdout.flush()
            del calls


def kernels(given: Given) -> None:
    """Microseconds and launches of each kernel in one backward, means of five."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU
    given.seqlens = given.seqlens or ([1024, 4096] if not given.tiny else [])
    for cell in grid(given):
        mask = tw.causal if cell.causal else None
        who = {"hopper": tilewise(ROWS[DEVICE][-1], mask=mask)}
        if given.triton:
            who["triton"] = tilewise(ROWS[DEVICE][0], mask=mask)
        for name, attention in who.items():
            try:
                call = prepared(attention, inputs(cell.shape, DTYPE, DEVICE), 1)
            except Exception as problem:
                print(f"    {label(cell)} {name}: {failure_message(problem)[:110]}")
                continue
            for _ in range(3):
                call()
            wait()
            with profile(activities=[activity]) as found:
                for _ in range(5):
                    call()
                wait()
            rows = []
            for event in found.key_averages():
                total = event.self_device_time_total if DEVICE == "cuda" else event.self_cpu_time_total
                if total > 0:
                    short = re.sub(r"<.*|\(.*", "", event.key).split("::")[-1].removeprefix("void ")
                    rows.append((total / 5, event.count / 5, short[:36]))
            rows.sort(reverse=True)
            text = ", ".join(f"{n} {us:.1f}" + (f" ({c:g}x)" if c != 1 else "") for us, c, n in rows[:8])
            print(f"{label(cell):<18} {name}: {sum(us for us, _, _ in rows):8.1f} us = {text}", flush=True)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


PARTS = {"f": forward, "b": backward, "g": grouped, "d": deterministic, "m": formulas, "k": kernels}


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--triton", action="store_true")
    parser.add_argument("--fa4", action="store_true", help="FlashAttention-4 too")
    parser.add_argument("--dims", type=numbers, default=[])
    parser.add_argument("--seqlens", type=numbers, default=[])
    parser.add_argument("--masks", type=lambda text: text.split(","), default=[])
    parser.add_argument("--tiny", action="store_true", help="small problems, to try this script on a CPU")
    given = parser.parse_args()
    given.fa4 = find_fa4(DEVICE)[0] if given.fa4 else None
    for part in given.parts:
        start = time.time()
        print(f"-- {part}: {PARTS[part].__doc__ or PARTS[part].__name__}", flush=True)
        PARTS[part](argparse.Namespace(**vars(given)))
        print(f"   {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
