"""Question `tuning`: how long `tilewise tune-sparse` and `tilewise tune-quant` take from the command to its answer,
each in a process of its own, and what error they settle for, of at most 5 %.

Part demo: the layers of the demo's model, which is trained for a moment first; in tiles of 32, of its 256 tokens.

Part dumps: files of two layers, 32,768 tokens, 16 heads of 128, queries and keys that follow a random walk
(`sparse.drifting`), in tiles of 128.

Times are those of whole processes, the first of which, where kernels are compiled, is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Options
from benchmarks.cases.sparse import drifting
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.timing import quantiles
from tools.families import FAMILIES

QUESTION = "tuning"
MOST = 0.05  # relative L1 error of a head
LIMIT_S = 600
INCLUDES = "a process: start, layers read or trained, looked at and timed, the file written"


def run(options: Options) -> None:
    """Parts demo and dumps."""
    device, rounds = options.device, 1 if options.quick else 3
    method = f"monotonic clock around a process, {rounds} after one that is not counted"
    writer = Writer(current(device), method=method, ceilings=(None, None), results=options.out)
    small = ["--seconds=0.01"] if options.quick else []
    with tempfile.TemporaryDirectory() as folder:
        if options.wants("demo"):
            _measure(writer, "the demo's model", "32", ["--demo", *small], Path(folder), device, rounds)
        if options.wants("dumps"):
            shape, tile = ((1, 32_768, 16, 128), 128) if not options.quick else ((1, 160, 4, 16), 16)
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            files = [str(Path(folder) / f"layer{n}.pt") for n in range(2)]
            for n, file in enumerate(files):
                tensors = drifting(shape, tile, dtype, device, near=3.0 + n)
                torch.save(dict(zip("qkv", (x.cpu() for x in tensors), strict=True)), file)
            what = f"2 layers, {shape[1]:,} tokens, {shape[2]} heads of {shape[3]}"
            _measure(writer, what, str(tile), [*files, *small], Path(folder), device, rounds)


def _measure(
    writer: Writer, what: str, tile: str, arguments: list[str], folder: Path, device: str, rounds: int
) -> None:
    """A record of each command."""
    where = [f"--device={device}", f"--max-error={MOST}", "--json"]
    commands = {"tune-sparse": [f"--block={tile}"], "tune-quant": ["--per-head"]}
    for name, own in commands.items():
        times: list[float] = []
        for n in range(rounds + 1):
            out = [f"--out={folder / f'{tile}.{n}.json'}"] if name == "tune-sparse" else []
            ms, answer = _process([name, *arguments, *own, *out, *where])
            times += [ms] if n else []
        family = ("select" if name == "tune-sparse" else "quantize") + ("_triton" if device == "cuda" else "_cpu")
        writer.write(
            QUESTION, {"operation": name, "workload": what}, f"tilewise.{name.replace('-', '_')}",
            times_ms=quantiles(times), error=_settled(name, answer), includes=INCLUDES, sources=FAMILIES[family].hash(),
        )  # fmt: skip


def _process(command: list[str]) -> tuple[float, dict[str, Any]]:
    """(milliseconds of a process, what it printed)"""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tilewise.cli", *command], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    ms = 1e3 * (time.perf_counter() - started)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return ms, answer


def _settled(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The largest error of a head, and what is computed for it."""
    layers = answer["layers"]
    if name == "tune-sparse":
        density = [share for layer in layers for share in layer["found"]["density"]]
        worst = max(error for layer in layers for error in layer["found"]["errors"])
        metric = f"relative L1 of the worst head, {sum(density) / len(density):.0%} of the tiles computed"
    else:
        chosen = [layer["chosen"] for layer in layers]
        trials = [{trial["scheme"]: trial for trial in layer["trials"]} for layer in layers]
        worst = max(max(found[one]["heads"]) for found, one in zip(trials, chosen, strict=True))
        metric = f"relative L1 of the worst head, {', '.join(dict.fromkeys(chosen))}"
    return {"metric": metric, "value": float(f"{worst:.3g}")}
