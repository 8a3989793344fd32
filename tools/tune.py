"""Time tile configurations of one kernel on a GPU and propose a row for its table: `python -m tools.tune --help`.

Nothing is tuned when the library runs; what stands in `configs.py` and `gluon_attention.py` was chosen with runs of
this tool, and `benchmarks/NOTES.md` says why.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tilewise as tw
from benchmarks.contenders import inputs
from benchmarks.timing import ceilings, interleaved
from tilewise.ops.attention.configs import Config
from tilewise.ops.attention.problem import make_call

# block_m, block_n, warps, stages: what is tried where nothing is named
_PORTABLE = tuple(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)))
CANDIDATES: dict[str, tuple[tuple[int, ...], ...]] = {
    "forward": _PORTABLE,
    "keys": _PORTABLE,
    "queries": _PORTABLE,
    "hopper forward": tuple(itertools.product((128, 192), (64, 128), (4,), (2, 3))),
    "hopper backward": tuple(itertools.product((64, 128), (128,), (4,), (2,))),
}
MASKS: dict[str, Callable[[int, str], Any]] = {
    "none": lambda seqlen, device: None,
    "causal": lambda seqlen, device: tw.causal,
    "window": lambda seqlen, device: tw.window(max(1, seqlen // 8)),
    "document": lambda seqlen, device: tw.document(torch.arange(seqlen, device=device) // max(1, seqlen // 8)),
}


@contextlib.contextmanager
def using(kernel: str, config: Config, plans: Any = None) -> Iterator[None]:
    """Calls take `config` for `kernel`, and keep their plans in `plans` (none by default)."""
    from tilewise.ops import triton_launch
    from tilewise.ops.attention import gluon_attention, triton_attention, triton_plans

    module = gluon_attention if kernel.startswith("hopper") else triton_plans
    known = module.config_of
    plans = plans or triton_launch.Plans()
    with (
        mock.patch.object(module, "config_of", lambda name, call: config if name == kernel else known(name, call)),
        mock.patch.object(triton_attention, "_PLANS", plans),
        mock.patch.object(gluon_attention, "_PLANS", plans),
    ):
        yield


def proposal(kernel: str, head_dim: int, config: Config) -> str:
    """The row as it would stand in the table."""
    numbers = [str(n) for n in (config.block_m, config.block_n, config.warps, config.stages)]
    return f"{kernel}: Row({head_dim}, Config({', '.join([*numbers, *(['True'] if config.tma else [])])}))"


def _problem(given: argparse.Namespace, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    heads = max(1, 2048 // given.head_dim)
    shape = (max(1, given.tokens // given.seqlen), given.seqlen, heads, given.head_dim)
    return inputs(shape, torch.bfloat16, device), {"mask": MASKS[given.mask](given.seqlen, device)}


def compiled(job: tuple[argparse.Namespace, Config]) -> str:
    """Compile a candidate with no GPU, so that it lies in Triton's cache; what went wrong, if anything."""
    from tilewise.testing.offline import compile_call

    given, config = job
    torch.set_num_threads(1)
    (q, k, v, _), arguments = _problem(argparse.Namespace(**{**vars(given), "tokens": given.seqlen}), "cpu")
    try:
        with using(given.kernel, config):
            compile_call(make_call(q, k, v, **arguments), given.sm, _row(given.kernel))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _row(kernel: str) -> str:
    return "hopper" if kernel.startswith("hopper") else "triton"


def measure(given: argparse.Namespace, configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Median times of all that run, the fastest first."""
    from tilewise.ops.triton_launch import Plans

    (q, k, v, do), arguments = _problem(given, "cuda")
    o = tw.attention(q, k, v, impl=_row(given.kernel), **arguments)

    def contender(config: Config) -> Callable[[], object]:
        plans = Plans()

        def forward() -> object:
            with torch.no_grad(), using(given.kernel, config, plans):
                return tw.attention(q, k, v, impl=_row(given.kernel), **arguments)

        def backward() -> object:
            with using(given.kernel, config, plans):
                return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

        return forward if "forward" in given.kernel else backward

    calls = {repr(config): contender(config) for config in configs}
    timed = interleaved(calls, device="cuda", rounds=given.rounds)
    found = []
    for config in configs:
        quantiles = timed[repr(config)].quantiles
        if quantiles is None:
            print(f"{config}: {timed[repr(config)].failure}", file=sys.stderr)
        else:
            found.append({"config": config, "ms": quantiles[1]})
    return sorted(found, key=lambda row: float(row["ms"]))


def main(argv: list[str] | None = None) -> int:
    """Compile, time, print a line for each candidate and the proposal; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kernel", choices=sorted(CANDIDATES))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16_384, help="of all sequences; heads times head_dim is 2048")
    parser.add_argument("--mask", choices=sorted(MASKS), default="none")
    parser.add_argument("--only", nargs="*", default=[], help="candidates as block_m,block_n,warps,stages")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--sm", type=int, default=90, help="compute capability to compile for")
    parser.add_argument("--out", type=Path, help="write the times as JSON")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU: tile configurations are chosen by their times", file=sys.stderr)
        return 2
    named = [tuple(int(n) for n in text.split(",")) for text in given.only] or CANDIDATES[given.kernel]
    configs = [Config(*numbers, tma=given.sm >= 90) for numbers in named]
    with ProcessPoolExecutor(given.jobs) as pool:
        failures = dict(zip(configs, pool.map(compiled, [(given, config) for config in configs]), strict=True))
    for config, failure in failures.items():
        if failure:
            print(f"{config}: {failure}", file=sys.stderr)
    rows = measure(given, [config for config, failure in failures.items() if not failure])
    matmul = ceilings("cuda")[0]
    print(f"{given.kernel}, head dimension {given.head_dim}, {given.mask}, {given.seqlen} tokens; matmul {matmul:.0f}")
    for row in rows:
        print(f"{row['ms']:9.4f} ms  {row['config']}")
    if rows:
        print(proposal(given.kernel, given.head_dim, rows[0]["config"]))
    if given.out:
        lines = [{"config": vars(row["config"]), "ms": row["ms"]} for row in rows]
        given.out.write_text(json.dumps({"problem": vars(given) | {"out": str(given.out)}, "times": lines}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
