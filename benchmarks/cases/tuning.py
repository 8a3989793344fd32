"""Question `tuning`: how long `tilewise tune-sparse` and `tilewise tune-quant` take from the command to its answer,
each in a process of its own, and what error they settle for, of at most 5 %.

Part demo: the layers of the demo's model, which is trained for a moment first; in tiles of 32, of its 256 tokens.

Part dumps: files of two layers, 32,768 tokens, 16 heads of 128, queries and keys that follow a random walk
(`sparse.drifting`), in tiles of 128.

Times are those of whole processes, the first of which, where kernels are compiled, is left out.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.cases import Options
from benchmarks.cases.sparse import MOST, drifting
from benchmarks.environment import current
from benchmarks.process import printed_by
from benchmarks.records import Writer
from benchmarks.timing import quantiles
from tools.families import FAMILIES

QUESTION = "tuning"
LIMIT_S = 600
INCLUDES = "a process: start, layers read or trained, looked at and timed, what was found written or printed"
Layers = list[dict[str, Any]]


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
    for name, (operation, settled) in COMMANDS.items():
        times: list[float] = []
        for n in range(rounds + 1):
            own = ["--per-head"]
            if name == "tune-sparse":  # which would go on with a file that is there
                own = [f"--block={tile}", f"--out={folder / f'{tile}.{n}.json'}"]
            ms, layers = _process([name, *arguments, *own, f"--device={device}", f"--max-error={MOST}", "--json"])
            times += [ms] if n else []
        worst, computed = settled(layers)
        family = FAMILIES[f"{operation}_{'triton' if device == 'cuda' else 'cpu'}"]
        writer.write(
            QUESTION, {"operation": name, "workload": what}, f"tilewise.{name.replace('-', '_')}",
            times_ms=quantiles(times), includes=INCLUDES, sources=family.hash(),
            error={"metric": f"relative L1 of the worst head, {computed}", "value": float(f"{worst:.3g}")},
        )  # fmt: skip


def _process(command: list[str]) -> tuple[float, Layers]:
    """(milliseconds of a process, what it says of the layers)"""
    started = time.perf_counter()
    try:
        printed = printed_by(["tilewise.cli", *command], LIMIT_S)
    except RuntimeError as error:
        raise RuntimeError(f"{' '.join(command)}: {error}") from error
    ms = 1e3 * (time.perf_counter() - started)
    layers: Layers = json.loads(printed)["layers"]
    return ms, layers


def _sparse(layers: Layers) -> tuple[float, str]:
    """(the largest error of a head, what is computed for it)"""
    found = [layer["found"] for layer in layers]
    density = [share for of_layer in found for share in of_layer["density"]]
    return max(max(of_layer["errors"]) for of_layer in found), f"{fmean(density):.0%} of the tiles computed"


def _quant(layers: Layers) -> tuple[float, str]:
    """(the largest error of a head, the schemes that were picked)"""
    picked = [next(t for t in layer["trials"] if t["scheme"] == layer["chosen"]) for layer in layers]
    return max(max(trial["heads"]) for trial in picked), ", ".join(dict.fromkeys(t["scheme"] for t in picked))


COMMANDS: dict[str, tuple[str, Callable[[Layers], tuple[float, str]]]] = {
    "tune-sparse": ("select", _sparse),
    "tune-quant": ("quantize", _quant),
}
