"""Outputs and gradients of one row of the dispatch table beside another's: `python -m tools.check_rows` on a GPU.

A quick look while a kernel changes, of many formulas, layouts and head dimensions, one line a problem; what must hold
is in tests/. Problems run in --jobs processes, so that kernels compile beside each other; one that hangs or breaks the
CUDA context fails (a traceback says where), and a new process goes on with the next. --cpu: cpu_tiled beside the
reference.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases.attention_formula import alibi_slopes, document_ids
from benchmarks.reference import relative_error

NAMES = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """`formula` makes (mask, score) from (seqlen_k, heads, device)."""

    name: str
    group: str  # problems of a group run in one process, which has their kernels then
    seqlen: tuple[int, int]
    head_dim: int
    formula: Callable[[int, int, str], tuple[Any, Any]]
    heads: tuple[int, int] = (4, 4)
    batch: int = 2
    head_dim_v: int | None = None
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 0  # deterministic=True, this many times
    quick: bool = False
    loud: float = 1.0  # factor of q


def problems(cut: int) -> list[Problem]:
    """Every problem; lengths and windows are divided by `cut`."""
    grid = (32, 32) if cut == 1 else (8, 8)
    near = (9, 9) if cut == 1 else (5, 5)
    formulas: dict[str, Any] = {
        "full": lambda n, h, d: (None, None),
        "causal": lambda n, h, d: (tw.causal, None),
        "window": lambda n, h, d: (tw.window(300 // cut), None),
        "softcap": lambda n, h, d: (tw.causal, tw.softcap(30.0)),
        "alibi": lambda n, h, d: (tw.causal, tw.alibi(alibi_slopes(h, d))),
        "document": lambda n, h, d: (tw.causal & tw.document(document_ids(n, d)), None),
        "neighborhood": lambda n, h, d: (tw.neighborhood(grid, near), None),
    }
    found: list[Problem] = []

    def add(head_dim: int, formula: str, *lengths: int | tuple[int, int], what: str = "", **more: Any) -> None:
        for length in lengths:
            q, k = length if isinstance(length, tuple) else (length, length)
            if formula != "neighborhood":
                q, k = q // cut, k // cut
            rows = f"{q}" if q == k else f"{q}x{k}"
            group = " ".join(filter(None, (f"d{head_dim}", formula, what)))
            found.append(Problem(f"{group} {rows}", group, (q, k), head_dim, formulas[formula], **more))

    for d in (64, 128, 256, 96, 192):
        for formula in ("causal", "full"):
            add(d, formula, 1000, quick=True)
            add(d, formula, 2048)
    for d in (64, 128, 256):
        add(d, "window", 1000, quick=d != 256)
        add(d, "window", 2048)
        add(d, "softcap", 1000, 2048, loud=3.0)
    for d in (128, 256):
        add(d, "alibi", 1000, 2048)
        add(d, "document", 1000, quick=d == 128)
        add(d, "document", 2048)
    for d in (64, 256):
        add(d, "neighborhood", math.prod(grid))
    for d in (64, 128, 256):
        add(d, "causal", 1000, 2048, what="gqa 8/2", heads=(8, 2), quick=d == 128)
    for d in (64, 128, 256):
        lengths = tuple(n if n < 2 else max(1, n // cut) for n in (0, 1, 130, 700, 64, 0, 999))
        total = sum(lengths) * cut
        add(d, "causal", total, what="packed", lengths=lengths, quick=d == 128)
        add(d, "causal", total, what="packed gqa 4/2", lengths=lengths, heads=(4, 2))
    for d in (128, 256):
        add(d, "causal", (500, 900), (900, 500), what="unequal", quick=d == 128)
    add(192, "causal", 1000, 2048, what="dv128", head_dim_v=128)
    add(128, "causal", 1000, 2048, what="fp16", dtype=torch.float16)
    if cut == 1:
        add(128, "causal", 1024, what="many items", batch=8, heads=(16, 16))
        add(64, "causal", 4096, what="many items", batch=4, heads=(16, 16))
    for d in (64, 128, 256):
        for formula in ("causal", "full"):
            small: dict[str, Any] = {"batch": 4, "heads": (8, 8)} if cut == 1 else {}
            add(d, formula, 2048, what="deterministic", repeats=5, quick=d == 128 and formula == "causal", **small)
    for d in (64, 128):
        for formula in ("window", "document", "softcap", "alibi"):
            add(d, formula, 1000, 2048, what="deterministic", repeats=5)
        add(d, "causal", total, what="packed gqa 4/2 deterministic", lengths=lengths, heads=(4, 2), repeats=5)
        add(d, "causal", (500, 900), (900, 500), what="unequal deterministic", repeats=5)
    return found


# one problem -------------------------------------------------------------------------------------------------------


def inputs(p: Problem, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v, do and the call's arguments."""
    (rows_q, rows_k), (heads, heads_kv) = p.seqlen, p.heads
    d_v = p.head_dim_v or p.head_dim
    generator = torch.Generator(device).manual_seed(0)
    lead_q, lead_k = ((rows_q,), (rows_k,)) if p.lengths else ((p.batch, rows_q), (p.batch, rows_k))
    if p.lengths:
        lead_q = lead_k = (sum(p.lengths),)
    sizes = ((heads, p.head_dim), (heads_kv, p.head_dim), (heads_kv, d_v), (heads, d_v))
    leads = (lead_q, lead_k, lead_k, lead_q)
    made = [torch.randn(*a, *b, generator=generator, device=device) for a, b in zip(leads, sizes, strict=True)]
    made[0] *= p.loud
    dtype = torch.float32 if device == "cpu" else p.dtype
    mask, score = p.formula(rows_k, heads, device)
    arguments: dict[str, Any] = {"mask": mask, "score": score}
    if p.lengths:
        arguments["layout"] = tw.Packed(torch.tensor([0, *p.lengths]).cumsum(0).to(device, torch.int32))
    return [t.to(dtype).requires_grad_(n < 3) for n, t in enumerate(made)], arguments


def results(tensors: list[torch.Tensor], arguments: dict[str, Any], impl: str, **more: Any) -> list[torch.Tensor]:
    q, k, v, do = tensors
    o = tw.attention(q, k, v, impl=impl, **arguments, **more)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2; nan where either is not finite."""
    if not bool(got.isfinite().all() & want.isfinite().all()):
        return math.nan
    return relative_error(got, want.double()) if bool(want.any()) else float(got.double().norm())


def attempt(p: Problem, device: str, ours: str, peer: str, tolerance: float) -> tuple[bool, str]:
    tensors, arguments = inputs(p, device)
    want = results(tensors, arguments, ours if p.repeats else peer)
    got = results(tensors, arguments, ours, **({"deterministic": True} if p.repeats else {}))
    note = ""
    for _ in range(p.repeats - 1):
        again = results(tensors, arguments, ours, deterministic=True)
        changed = [n for n, x, y in zip(NAMES, got, again, strict=True) if not torch.equal(x, y)]
        if changed:
            note = f"  bits of {', '.join(changed)} differ between runs"
            break
    if device == "cuda":
        torch.cuda.synchronize()
    errors = [error(x, y) for x, y in zip(got, want, strict=True)]
    passed = all(e < tolerance for e in errors) and not note
    return passed, " ".join(f"{n} {e:.1e}" for n, e in zip(NAMES, errors, strict=True)) + note


def work(given: argparse.Namespace) -> None:
    """Take names from stdin, answer each with one JSON line: passed, text, broken (this process can do no more)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    device, ours, peer = ("cpu", "cpu_tiled", "reference") if given.cpu else ("cuda", *given.rows)
    by_name = {p.name: p for p in problems(16 if given.cpu else 1)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // given.jobs))
    for line in sys.stdin:
        name, broken = line.rstrip("\n"), False
        faulthandler.dump_traceback_later(given.limit, exit=True)
        try:
            passed, text = attempt(by_name[name], device, ours, peer, given.tol)
        except Exception as problem:
            passed, text = False, f"{type(problem).__name__}: {' | '.join(str(problem).strip().splitlines()[:3])[:300]}"
            if given.verbose:
                traceback.print_exc()
            if device == "cuda":
                try:
                    torch.cuda.synchronize()
                except Exception:
                    broken = True
        faulthandler.cancel_dump_traceback_later()
        if device == "cuda" and not broken:
            torch.cuda.empty_cache()
        print(json.dumps([passed, text, broken]), file=answers, flush=True)


# all of them -------------------------------------------------------------------------------------------------------


def drive(groups: queue.Queue[list[str]], given: argparse.Namespace, done: dict[str, bool]) -> None:
    """One process at a time, a new one where the last ended."""
    worker: Any = None
    while True:
        try:
            names = groups.get_nowait()
        except queue.Empty:
            break
        for name in names:
            if worker is None:
                worker = subprocess.Popen(
                    [sys.executable, "-m", "tools.check_rows", "--worker", *sys.argv[1:]],
                    stdin=-1,
                    stdout=-1,
                    text=True,
                    bufsize=1,
                )
            start = time.time()
            worker.stdin.write(name + "\n")
            answer = worker.stdout.readline()
            if answer:
                passed, text, broken = json.loads(answer)
            else:
                seconds, code = time.time() - start, worker.wait()
                hung = seconds > given.limit
                passed, text, broken = False, f"{'HANG' if hung else 'the process died'}, exit {code}", True
            if broken:
                worker.kill()
                worker = None
            done[name] = passed
            print(f"{'PASS' if passed else 'FAIL'} {name:<40} {text}  ({time.time() - start:.0f} s)", flush=True)
    if worker is not None:
        worker.stdin.close()
        worker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs=2, default=["hopper", "triton"], help="the row to check, and the one beside it")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="about a third of the problems")
    parser.add_argument("--only", nargs="+", default=[], help="problems whose name has one of these in it")
    parser.add_argument("--list", action="store_true", help="name the problems")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a problem, compilation included")
    parser.add_argument("--tol", type=float, default=2e-2, help="relative L2 between the two")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of exceptions")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, lengths divided by 16")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return 0
    start = time.time()
    wanted = [
        p
        for p in problems(16 if given.cpu else 1)
        if (p.quick or not given.quick) and (not given.only or any(text in p.name for text in given.only))
    ]
    if not wanted:
        parser.error("no problem has such a name; --list names all")
    by_group: dict[str, list[str]] = {}
    for p in wanted:
        by_group.setdefault(p.group, []).append(p.name)
    if given.list:
        print("\n".join(p.name for p in wanted))
        print(f"{len(wanted)} problems in {len(by_group)} groups")
        return 0
    groups: queue.Queue[list[str]] = queue.Queue()
    for names in by_group.values():
        groups.put(names)
    done: dict[str, bool] = {}
    threads = [
        threading.Thread(target=drive, args=(groups, given, done)) for _ in range(min(given.jobs, len(by_group)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [p.name for p in wanted if not done.get(p.name)]
    print(f"total: {len(wanted) - len(failed)} passed, {len(failed)} failed, {time.time() - start:.0f} s")
    for name in failed:
        print(f"  failed: {name}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
