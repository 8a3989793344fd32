"""Speed of several source trees side by side, on a GPU: `python -m tools.compare_trees PART TREE TREE...`

A TREE is a folder with a package `tilewise` in it: `src`, or a copy of it with a change. PART and the options are those
of `tools.time_rows`, which runs once per tree and round in a process of its own, the trees in turns. Clocks drift from
process to process, so each rate stands beside its ratio to a peer's in the same process. Before that all trees run
once at the same time, so that kernels are compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
WIDTH = 22
Found = dict[str, dict[str, list[tuple[float, float]]]]  # by problem and tree: rate and ratio of every round


def environment_of(tree: str) -> dict[str, str]:
    """For a process that imports the tilewise of one tree, and tools and benchmarks from here."""
    paths = [str(Path(tree).resolve()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def check_trees(parser: argparse.ArgumentParser, trees: list[str]) -> None:
    """End with an error where one holds no package."""
    for tree in trees:
        if not (Path(tree) / "tilewise" / "__init__.py").is_file():
            parser.error(f"TREE must hold a package tilewise, got {tree}")


def start(tree: str, arguments: list[str], results: str) -> subprocess.Popen[bytes]:
    """`time_rows` with the tilewise of one tree."""
    command = [sys.executable, "-m", "tools.time_rows", *arguments, "--json", results]
    return subprocess.Popen(command, env=environment_of(tree), stdout=subprocess.DEVNULL)


def together(trees: list[str], arguments: list[str], results: str) -> None:
    """`time_rows` with all of these trees at once; none is left running if one fails."""
    running = [start(tree, arguments, results) for tree in trees]
    try:
        for tree, process in zip(trees, running, strict=True):
            if process.wait(LIMIT_S) != 0:
                sys.exit(f"tools.time_rows failed with {tree}")
    except subprocess.TimeoutExpired as problem:
        sys.exit(f"tools.time_rows took longer than {problem.timeout} s")
    finally:
        for process in running:
            process.kill()


def measured(trees: list[str], arguments: list[str], rounds: int) -> Found:
    """Ratios are to the first peer that every tree and round has, nan where there is none."""
    lines: dict[str, list[tuple[str, dict[str, float]]]] = defaultdict(list)
    for turn in range(rounds):
        for tree in trees[:: 1 if turn % 2 == 0 else -1]:
            with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as results:
                together([tree], arguments, results.name)
                for line in map(json.loads, results):
                    lines[line["problem"]].append((tree, line["tflops"]))
    found: Found = {}
    for problem, runs in lines.items():
        ours, *peers = runs[0][1]
        peer = next((name for name in peers if all(name in tflops for _, tflops in runs)), None)
        found[problem] = defaultdict(list)
        for tree, tflops in runs:
            found[problem][tree].append((tflops[ours], tflops[ours] / tflops[peer] if peer else math.nan))
    return found


def shown(found: list[tuple[float, float]]) -> str:
    """Medians of what was found in every round; nothing where a call failed."""
    if not found:
        return f"{'-':>{WIDTH}}"
    rate, ratio = (statistics.median(values) for values in zip(*found, strict=True))
    return f"{f'{rate:.1f} x{ratio:7.3f}':>{WIDTH}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", help="a part of tools.time_rows that prints rates: f, b, g, d or m")
    parser.add_argument("trees", nargs="+", metavar="TREE")
    parser.add_argument("--rounds", type=int, default=2)
    given, options = parser.parse_known_args()
    check_trees(parser, given.trees)
    arguments = [given.part, *options]
    together(given.trees, arguments, os.devnull)
    print(f"{'TFLOP/s, x of a peer':<34}" + "".join(f"{tree[1 - WIDTH :]:>{WIDTH}}" for tree in given.trees))
    for problem, by_tree in measured(given.trees, arguments, given.rounds).items():
        print(f"{problem:<34}" + "".join(shown(by_tree[tree]) for tree in given.trees))


if __name__ == "__main__":
    main()
