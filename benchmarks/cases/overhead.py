"""Questions `call_overhead`, `first_result` and `compilations`: what a call costs beside its kernel.

`call_overhead`: host time per eager call on a problem so small that the device never holds the host up.
`first_result`: a new formula in a process that has run attention before, and as the first call of a process; each
with empty caches, then from the disk caches that left.
`compilations`: Triton compilations of the first call, and after a change of number, tensor or length.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.contenders import sources_of
from benchmarks.environment import current
from benchmarks.process import printed_by
from benchmarks.records import Writer
from benchmarks.timing import host_times

PROBE_LIMIT_S = 300
METHOD = (
    "call_overhead: monotonic clock around {repeat} calls in a row, contenders alternating, {rounds} rounds; "
    "first_result and compilations: a fresh process per value, caches in a new folder"
)


def run(options: Options) -> None:
    """All three questions."""
    rounds, repeat = (options.rounds, 100) if not options.quick else (2, 5)
    writer = Writer(
        current(options.device),
        method=METHOD.format(repeat=repeat, rounds=rounds),
        ceilings=(None, None),
        results=options.out,
    )
    if options.wants("call_overhead"):
        _call_overhead(options, writer, rounds, repeat)
    for impl in ("tilewise", "flex"):
        if options.wants("first_result"):
            # FlexAttention's first result takes long and is no line that we must draw finely: one process.
            _first_result(impl, options, writer, samples=3 if impl == "tilewise" and not options.quick else 1)
        if options.wants("compilations"):
            _compilations(impl, writer)


def _call_overhead(options: Options, writer: Writer, rounds: int, repeat: int) -> None:
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (1, 128, 2, 64)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    first = [t.transpose(1, 2) for t in (q, k, v)]
    grad = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    first_grad = [t.transpose(1, 2) for t in grad]
    mask = tw.causal & tw.window(64)
    row = tw.why(q, k, v, mask=mask).chosen
    block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 64), None, None, 128, 128, device=device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    causal, window = "causal", "causal & window(64)"
    calls: dict[tuple[str, str], Callable[[], object]] = {
        (causal, "tilewise"): lambda: tw.attention(q, k, v, mask=tw.causal),
        (causal, "sdpa"): lambda: F.scaled_dot_product_attention(*first, is_causal=True),
        (window, "tilewise"): lambda: tw.attention(q, k, v, mask=mask),
        (window, "tilewise (mask built in the call)"): lambda: tw.attention(q, k, v, mask=tw.causal & tw.window(64)),
        (window, "flex"): lambda: compiled(*first, block_mask=block_mask),
        (f"{window}, gradients on", "tilewise"): lambda: tw.attention(*grad, mask=mask),
        (f"{window}, gradients on", "flex"): lambda: compiled(*first_grad, block_mask=block_mask),
        **_layouts(q, k, v),
    }
    problem = {
        "batch": 1, "seqlen_q": 128, "seqlen_k": 128, "num_heads_q": 2, "num_heads_kv": 2, "head_dim": 64,
        "causal": True, "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    by_name = {" by ".join(key): call for key, call in calls.items()}
    times = host_times(by_name, device=device, rounds=rounds, repeat=repeat)
    for formula, impl in calls:
        timed = times[f"{formula} by {impl}"]
        writer.write(
            "call_overhead",
            {"formula": formula, **problem},
            impl,
            times_ms=timed.quantiles,
            error={"metric": "failure", "message": timed.failure} if timed.failure else None,
            includes="host time of one forward call, launches included; flex: block mask built beforehand"
            + ("" if device == "cuda" else "; on a CPU the arithmetic too"),
            sources=_sources(impl, row),
        )


def _layouts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    """Calls over sequences of different lengths: documents, packed, and one query of each of four requests in pages;
    with and without declared bounds.
    """
    ids = torch.arange(128, device=q.device, dtype=torch.int32) // 40
    document, listed = tw.causal & tw.document(ids), tw.causal & tw.dilated(2)
    cu = torch.tensor([0, 40, 128], dtype=torch.int32, device=q.device)
    rows = [x[0] for x in (q, k, v)]
    pools = [x.view(8, 16, *x.shape[2:]) for x in (k, v)]
    table = torch.arange(8, dtype=torch.int32, device=q.device).view(4, 2)
    lengths = torch.tensor([17, 32, 20, 9], dtype=torch.int32, device=q.device)
    packed, paged, one = tw.Packed(cu), tw.Paged(table, lengths), q[0, :4, None]
    bounded = tw.Packed(cu, max_seqlen_q=88, max_seqlen_k=88)
    bounded_pages = tw.Paged(table, lengths, max_seqlen_k=32)
    plan, few = tw.plan(one, *pools, layout=paged), tw.Sage2()
    return {
        ("causal & document", "tilewise"): lambda: tw.attention(q, k, v, mask=document),
        ("causal, packed", "tilewise"): lambda: tw.attention(*rows, layout=packed, mask=tw.causal),
        ("causal, packed", "tilewise (bounds declared)"): lambda: tw.attention(*rows, layout=bounded, mask=tw.causal),
        ("causal & dilated(2), packed", "tilewise"): lambda: tw.attention(*rows, layout=packed, mask=listed),
        ("causal & dilated(2), packed", "tilewise (bounds declared)"): lambda: tw.attention(
            *rows, layout=bounded, mask=listed
        ),
        ("none, paged", "tilewise"): lambda: tw.attention(one, *pools, layout=paged),
        ("none, paged", "tilewise (planned)"): lambda: plan.run(one, *pools),
        ("none, paged, 8 bits", "tilewise"): lambda: tw.attention(one, *pools, layout=paged, quantize=few),
        ("none, paged, 8 bits", "tilewise (bounds declared)"): lambda: tw.attention(
            one, *pools, layout=bounded_pages, quantize=few
        ),
    }


def _sources(impl: str, row: str | None) -> str | None:
    return sources_of(f"tilewise.{row}") if impl.startswith("tilewise") else None


def _probe_row() -> str:
    """The row that benchmarks/probe.py runs on."""
    return "triton" if torch.cuda.is_available() else "cpu_tiled"


def _probe(what: str, impl: str, caches: str) -> dict[str, Any]:
    env = dict(os.environ)
    for name in ("TRITON_CACHE_DIR", "TILEWISE_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        env[name] = os.path.join(caches, name.lower())
    printed = printed_by(["benchmarks.probe", what, impl], PROBE_LIMIT_S, env)
    answer: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return answer


def _first_result(impl: str, options: Options, writer: Writer, samples: int) -> None:
    problem = {"formula": "causal & window | prefix, sloped score", "seqlen_q": 1024, "seqlen_k": 1024}
    befores = {
        "first_result": "the process has run attention without a formula",
        "first_call": "the first call of the process",
    }
    for what, before in befores.items():
        times: dict[str, list[float]] = {"cold": [], "disk cache": []}
        failure = None
        try:
            for _ in range(samples):
                with tempfile.TemporaryDirectory() as caches:
                    for values in times.values():
                        values.append(_probe(what, impl, caches)["seconds"] * 1e3)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        for state, values in times.items():
            ordered = sorted(values)
            writer.write(
                "first_result",
                {**problem, "caches": state, "before": before},
                impl,
                times_ms=None if failure else (ordered[0], ordered[len(ordered) // 2], ordered[-1]),
                error={"metric": "failure", "message": failure} if failure else None,
                includes=f"from the call to a number on the host, CUDA started; {samples} processes (p20, p80: least, "
                "greatest); flex: its block mask too",
                sources=_sources(impl, _probe_row()),
            )


def _compilations(impl: str, writer: Writer) -> None:
    try:
        with tempfile.TemporaryDirectory() as caches:
            found = _probe("compilations", impl, caches)
        failure = None
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found, failure = {"first call": None}, str(error)
    for change, count in found.items():
        writer.write(
            "compilations",
            {"formula": "causal & window | prefix, sloped score", "change": change},
            impl,
            error={"metric": "failure", "message": failure} if failure else None,
            includes="kernels that Triton builds or loads, plus graphs that torch.compile builds, in one forward call",
            sources=_sources(impl, _probe_row()),
            count=count,
        )
