"""Times of calls by several source trees, in microseconds: `python -m tools.compare_trees TREE TREE... --calls CALL...`

A TREE is a folder with a package `tilewise` in it: `src`, or a copy of it with a change. Each has a process that makes
all calls at the start, so that kernels compile beside each other, and then times the one that it is told. The trees
take turns call by call, so that clocks and heat are shared: differences of a percent show. The error of every call is
beside float64 attention.

A CALL is a step of a server, by its name (`tools.tree_calls.STEPS`, "mixed", "two-calls"), or forward (f) or backward
(b) of attention: formula, tokens of a sequence and head dimension, as f:causal:2048:128 or b:window:8192:64, 16,384
tokens in all, heads times head dimension 2,048. What may follow: heads, as 32/8, "deterministic", a scheme, as sage2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import interleaved, quantiles
from tools.tree_calls import Made, is_step, make, problem_of

ROOT = Path(__file__).resolve().parents[1]
CALLS = 10  # in one turn, unless its length in time is given
WIDTH = 44


def serve(names: list[str], quick: bool) -> None:
    """Make these calls, say their errors, then time each name that stands in a line of the input."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls: dict[str, Made] = {}
    for name in names:
        calls[name] = make(name, device, quick)
        _say({"call": name, "error": calls[name].error(calls[name].call())})
    _say({})
    for line in sys.stdin:
        made = calls[line.strip()]
        rounds = 1 if made.turn_ms and device == "cuda" else CALLS
        timed = interleaved({"": made.call}, device=device, rounds=rounds, warmup_ms=10.0, turn_ms=made.turn_ms)[""]
        _say({"times_us": [1e3 * time for time in timed.times_ms]})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def start(tree: str, names: list[str], quick: bool) -> subprocess.Popen[str]:
    """The process of one tree, which imports its tilewise, and tools and benchmarks from here."""
    paths = [str(Path(tree).resolve()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tools.compare_trees", tree, "--serve", "--calls", *names, *["--quick"] * quick]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def told(tree: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next message of a tree's process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"{tree}: its process has ended")
    message: dict[str, Any] = json.loads(line)
    return message


def compare(trees: list[str], names: list[str], rounds: int, quick: bool) -> None:
    """Print errors, then a table of medians, with what a fifth of the times is below and above, and beside the first
    tree's. A tree that is named twice shows what of it is chance.
    """
    running = [start(tree, names, quick) for tree in trees]
    places = range(len(trees))
    try:
        for tree, process in zip(trees, running, strict=True):
            while message := told(tree, process):
                print(f"{tree[1 - WIDTH :]:<{WIDTH}}{message['call']:<24} error {message['error']:.1e}")
        print(f"{'us: median (20 %, 80 %)':<{WIDTH}}" + "".join(f"{tree[1 - WIDTH :]:>{WIDTH}}" for tree in trees))
        for name in names:
            times: list[list[float]] = [[] for _ in places]
            for turn in range(rounds):
                for n in [*places[turn % len(trees) :], *places[: turn % len(trees)]]:
                    process = running[n]
                    assert process.stdin is not None
                    print(name, file=process.stdin, flush=True)
                    times[n] += told(trees[n], process)["times_us"]
            print(f"{name:<{WIDTH}}" + "".join(f"{_shown(found, times[0]):>{WIDTH}}" for found in times), flush=True)
    finally:
        for process in running:
            process.kill()


def _shown(times: list[float], first: list[float]) -> str:
    low, middle, high = quantiles(times)
    return f"{middle:.1f} ({low:.1f}, {high:.1f}) x{middle / quantiles(first)[1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trees", nargs="+", metavar="TREE")
    parser.add_argument("--calls", nargs="+", metavar="CALL", required=True, help="see the top of this file")
    parser.add_argument("--rounds", type=int, default=5, help=f"turns of each tree, of {CALLS} calls or 120 ms")
    parser.add_argument("--quick", action="store_true", help="tiny calls, to see that it runs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.calls, given.quick)
        return
    for tree in given.trees:
        if not (Path(tree) / "tilewise" / "__init__.py").is_file():
            parser.error(f"TREE must hold a package tilewise, got {tree}")
    for name in given.calls:
        try:
            if not is_step(name):
                problem_of(name)
        except ValueError as problem:
            parser.error(str(problem))
    compare(given.trees, given.calls, given.rounds, given.quick)


if __name__ == "__main__":
    main()
