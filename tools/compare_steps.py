"""Times of a server's steps by several source trees, in microseconds: `python -m tools.compare_steps TREE TREE...`

A TREE is a folder with a package `tilewise` in it: `src`, or a copy of it with a change. Each has a process that
captures all STEPS in CUDA graphs at the start and then times the one that it is told. The trees take turns step by
step, so that clocks and heat are shared: differences of a percent show. (`tools.compare_trees` is for what has a rate
in TFLOP/s.) The error of every step is beside float64 attention.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import tilewise as tw
from benchmarks.cases.paged import dtype_of, reference, tensors
from benchmarks.cases.serving import encoded_pages, equal, mixed, mixed_problems, sharing
from benchmarks.reference import relative_error
from benchmarks.steps import ROWS
from benchmarks.timing import graphed, interleaved, quantiles
from tools.compare_trees import check_trees, environment_of

CALLS = 10  # timed in one turn
WIDTH = 32


class Step(NamedTuple):
    """Requests of so many tokens, of which so many are shared, in pages of 16; as codes; with prefixes looked for."""

    requests: int
    tokens: int
    shared: int = 0
    encoding: str | None = None
    looks: bool = False


STEPS = {
    "16x8k": Step(16, 8192),
    "64x4k": Step(64, 4096),
    "128x1k": Step(128, 1024),
    "1x128k": Step(1, 131_072),
    **{kind: Step(64, 4096, encoding=kind) for kind in ("int8", "fp8", "int4")},
    "apart": Step(32, 8192 + 128),
    "shared": Step(32, 8192 + 128, 8192, looks=True),
    "shared-1k": Step(128, 1024 + 64, 1024, looks=True),
    "shared-half": Step(32, 16_384, 8192, looks=True),
    "nothing": Step(64, 4096, looks=True),
    "nothing-1k": Step(128, 1024, looks=True),
}
MIXED = {"mixed": 0, "two-calls": -1}  # which of the case's contenders


def serve(names: list[str], quick: bool) -> None:
    """Capture these steps, say their errors, then time each name that stands in a line of the input."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = {}
    with torch.no_grad():
        for name in names:
            call, error = _mixed(name, device, quick) if name in MIXED else _decoding(STEPS[name], device, quick)
            calls[name] = graphed(call, device)
            _say({"step": name, "error": error(calls[name]())})
        _say({})
        for line in sys.stdin:
            name = line.strip()
            timed = interleaved({name: calls[name]}, device=device, rounds=CALLS, warmup_ms=1.0)[name]
            _say({"times_us": [1e3 * time for time in timed.times_ms]})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _decoding(step: Step, device: str, quick: bool) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    batch = equal(quick, (step.requests, step.tokens, step.shared))[0]
    given = tensors(batch, dtype_of(device), device)
    codes = None if step.encoding is None else encoded_pages(given.pool, step.encoding, None)
    k, v = (given.pool[:, 0], given.pool[:, 1]) if codes is None else codes
    layout = sharing(given.layout) if step.looks else given.layout
    some = range(0, len(batch.lengths), -(-len(batch.lengths) // 8))

    def error(o: torch.Tensor) -> float:
        return max(relative_error(o[r, 0], reference(batch, given, r, codes)) for r in some)

    return lambda: tw.attention(given.q, k, v, layout=layout, impl=ROWS[device][0]), error


def _mixed(name: str, device: str, quick: bool) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    (batch,) = mixed_problems(quick)
    contenders, error = mixed(batch, tensors(batch, dtype_of(device), device))
    impl = list(contenders)[MIXED[name]]
    return contenders[impl].step, lambda o: error(impl, o)


def start(tree: str, names: list[str], quick: bool) -> subprocess.Popen[str]:
    """The process of one tree."""
    command = [sys.executable, "-m", "tools.compare_steps", tree, "--serve", "--steps", *names, *["--quick"] * quick]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment_of(tree), stdin=pipe, stdout=pipe, text=True)


def told(tree: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next message of a tree's process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"{tree}: its process has ended")
    message: dict[str, Any] = json.loads(line)
    return message


def compare(trees: list[str], names: list[str], rounds: int, quick: bool) -> None:
    """Print errors, then a table of medians with what a fifth of the times is below and above."""
    running = {tree: start(tree, names, quick) for tree in trees}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    try:
        for tree, process in running.items():
            while message := told(tree, process):
                print(f"{tree[1 - WIDTH :]:<{WIDTH}}{message['step']:<12} error {message['error']:.1e}")
        for turn in range(rounds):
            for name in names:
                for tree in [*trees[turn % len(trees) :], *trees[: turn % len(trees)]]:
                    process = running[tree]
                    assert process.stdin is not None
                    print(name, file=process.stdin, flush=True)
                    times[name, tree] += told(tree, process)["times_us"]
    finally:
        for process in running.values():
            process.kill()
    print(f"{'us: median (20 %, 80 %)':<{WIDTH}}" + "".join(f"{tree[1 - WIDTH :]:>{WIDTH}}" for tree in trees))
    for name in names:
        print(f"{name:<{WIDTH}}" + "".join(f"{_shown(times[name, tree]):>{WIDTH}}" for tree in trees))


def _shown(times: list[float]) -> str:
    low, middle, high = quantiles(times)
    return f"{middle:.1f} ({low:.1f}, {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trees", nargs="+", metavar="TREE")
    parser.add_argument("--steps", nargs="+", choices=[*STEPS, *MIXED], default=[*STEPS, *MIXED])
    parser.add_argument("--rounds", type=int, default=6, help=f"turns of each tree, of {CALLS} calls each")
    parser.add_argument("--quick", action="store_true", help="tiny steps, to see that it runs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.steps, given.quick)
        return
    check_trees(parser, given.trees)
    compare(given.trees, given.steps, given.rounds, given.quick)


if __name__ == "__main__":
    main()
