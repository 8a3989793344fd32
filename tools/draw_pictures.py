"""Regenerate the documentation's pictures under docs/pictures/.

    python -m tools.draw_pictures            write every picture
    python -m tools.draw_pictures --check    write nothing; fail if a committed picture differs from what is drawn now

Bytes are the same for the same matplotlib version (the version is written inside each file).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilewise
from benchmarks.records import RESULTS, read
from tilewise.explain import draw, neighbours, roofline, timeline
from tilewise.explain.accumulators import flat_rows, product
from tilewise.explain.accuracy import accuracy
from tilewise.explain.ladder import climb
from tilewise.explain.masses import tile_masses
from tilewise.formula import Mask, library
from tilewise.kv.allocator import PageAllocator
from tilewise.ops.attention.reference_codes import attention_of_codes
from tilewise.schedule.worklist import WorkList
from tilewise.testing import kinds
from tilewise.testing.scenes import scene
from tilewise.testing.weight_codes import exponent_codes

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
TOKENS, BLOCK = 48, 8
RECORDS = "10076a7"  # the commit whose records stand in pictures: newer ones change none


def measured_ms(question: str, operation: str, shape: str) -> float:
    """The median of our record on an H200."""
    for record in read(RESULTS / "h200" / f"{question}.jsonl"):
        asked = record.impl == "tilewise.triton" and record.problem["operation"] == operation
        if asked and record.commit == RECORDS and record.problem["shape"] == shape and record.p50_ms is not None:
            return record.p50_ms
    raise LookupError(f"{question}: no record of {operation}, {shape}, at {RECORDS}")


def _panel(title: str, mask: Mask) -> draw.Panel:
    return draw.panel(mask, seqlen_q=TOKENS, seqlen_k=TOKENS, block_m=BLOCK, block_n=BLOCK, title=title)


def masks() -> Any:
    ids = torch.tensor([0] * 13 + [1] * 16 + [2] * 19)
    shown = {
        "causal": library.causal,
        "window(14)": library.window(14),
        "causal & document(ids)": library.causal & library.document(ids),
        "causal | prefix([20])": library.causal | library.prefix(torch.tensor([20])),
        "causal & chunked(16)": library.causal & library.chunked(16),
        "neighborhood((6, 8), (3, 3))": tilewise.neighborhood((6, 8), (3, 3)),
    }
    return draw.tiles([_panel(title, mask) for title, mask in shown.items()], BLOCK, BLOCK)


def query() -> Any:
    return draw.query(_panel("window(24)", library.window(24)), BLOCK, BLOCK, 35)


def ladder() -> Any:
    rungs: tuple[tuple[str, dict[str, bool]], ...] = (
        ("attention_two_pass", {}),
        ("attention_one_pass", {}),
        ("flash_attention_1", {}),
        ("flash_attention_2", {}),
        ("flash_attention_2", {"causal": True}),
    )
    return draw.ladder([climb(name, size=64, head_dim=16, **options) for name, options in rungs])


def shares() -> Any:
    keys = (100, 4000, 64, 900, 1500)
    return draw.shares(WorkList.build([1] * len(keys), keys, heads_q=8, heads_kv=2, programs=12))


def pages() -> Any:
    """A prompt, three continuations of it of which two have written, another sequence, and a page that is kept."""
    allocator = PageAllocator(num_pages=14, page_size=4)
    prompt, other, gone = (allocator.create() for _ in range(3))
    allocator.append(prompt, 14)
    allocator.append(other, 9)
    allocator.append(gone, 4)
    allocator.keep(gone.pages[0])
    one, two, _three = allocator.fork(prompt, 3)
    allocator.append(one, 1)
    allocator.append(two, 6)
    allocator.free(gone)
    return draw.pages(allocator, ["prompt", "another", "fork 1", "fork 2", "fork 3"])


def traffic() -> Any:
    return draw.traffic(8192, 64)


def rooflines() -> Any:
    heads = {"num_heads_q": 32, "num_heads_kv": 8}
    problems = {
        "decode, 1 query": roofline.Problem.decode(8192, batch=16, **heads),
        "decode, 8 queries": roofline.Problem.decode(8192, seqlen_q=8, batch=16, **heads),
        "causal forward, 512": roofline.Problem(512, batch=16, causal=True, **heads),
        "causal forward, 8k": roofline.Problem(8192, causal=True, **heads),
    }
    return draw.roofline({label: roofline.estimate(problem, "H200") for label, problem in problems.items()})


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As models of transformers have it, an operator at a time."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def fusion() -> Any:
    """What stands beside attention, operator by operator and in one pass, with the times of one run's records."""
    rows, width, classes = 16_384, 4096, 131_072
    subjects = {
        "RMSNorm": dataclasses.replace(neighbours.SUBJECTS["rms_norm"], plain=_rms_norm),
        "SwiGLU": neighbours.SUBJECTS["swiglu"],
    }
    points, measured = {}, {}
    for label, subject in subjects.items():
        counted, _ = neighbours.in_operators(subject, rows, width, torch.bfloat16)
        with torch.device("meta"):
            fewest, _ = subject.fewest(neighbours.placed(subject.make(rows, width), "meta", torch.bfloat16))
        points[f"{label}, one pass"] = roofline.Work(counted.operations, fewest)
        time = measured_ms("neighbours_forward", label.lower().replace("rms", "rms_"), f"{rows:,} × {width:,}")
        measured[f"{label}, one pass"] = time / 1e3
        if label == "RMSNorm":
            points[f"RMSNorm, {counted.operators} passes"] = roofline.Work(counted.operations, counted.bytes)
    nbytes = 2 * 2 * (rows + classes) * width  # x and weight read, and a gradient of each written
    points["linear layer, loss"] = roofline.Work(6 * rows * width * classes, nbytes, "bf16")
    shape = f"{rows:,} × {width:,} × {classes:,}"
    measured["linear layer, loss"] = measured_ms("neighbours_step", "linear_cross_entropy", shape) / 1e3
    return draw.roofline({label: roofline.estimate(work, "H200") for label, work in points.items()}, measured)


def warpgroups() -> Any:
    return draw.timeline(timeline.Trip.of(block_n=128, head_dim=128), timeline.SCHEDULES)


KINDS = {"gaussian": "Gaussian", "biased": "some channels far from 0", "outliers": "one outlier in a thousand"}
CODES = {
    "int4": tilewise.Sage("int4", pv="bf16"),
    "int4, rotated": tilewise.Sage("int4", pv="bf16", rotate="hadamard"),
    "fp8": tilewise.Sage("fp8", pv="bf16"),
    "int8": tilewise.Sage("int8", pv="bf16"),
    "int8, rotated": tilewise.Sage("int8", pv="bf16", rotate="hadamard"),
}


def _rounded(error: float) -> float:
    """Two digits: a picture does not show what another processor's last bit is."""
    return float(f"{error:.2g}")


def granularity() -> Any:
    """Codes of queries and keys alone, keys centred: values stay as they are."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for kind, title in KINDS.items():
        q, k, v = kinds.heads(kind, 2, tokens=1024)
        q = q[:, :256]
        want = tilewise.attention(q.double(), k.double(), v.double(), impl="reference")
        panels[title] = {label: {} for label in CODES}
        for label, scheme in CODES.items():
            for shared in ("block", "thread", "token"):
                asked = dataclasses.replace(scheme, q_scale=shared, k_scale=shared)
                x = tilewise.quantize_qkv(q, k, v, scheme=asked)
                o, _ = attention_of_codes(dataclasses.replace(x, v=v))
                panels[title][label][shared] = _rounded(accuracy(o, want).relative_l1)
    return draw.errors(panels, xlabel="who shares a scale")


def key_codes() -> Any:
    """Codes of keys, as int8 with a scale for a block."""
    panels = {}
    shown = {
        "biased": {"channels far from 0": tilewise.Sage(smooth=()), "centred": tilewise.Sage(smooth=("k",))},
        "outliers": {"outliers": tilewise.Sage(), "rotated": tilewise.Sage(rotate="hadamard")},
    }
    for kind, schemes in shown.items():
        q, k, v = kinds.heads(kind, 4, tokens=1024)
        for label, scheme in schemes.items():
            asked = dataclasses.replace(scheme, k_scale="block")
            codes = tilewise.quantize_qkv(q, k, v, scheme=asked, impl="reference").k
            panels[label] = torch.bincount(codes.flatten().long() + 127, minlength=255).tolist()
    return draw.codes(panels)


def kept() -> Any:
    """Weights and values in FP8, as a model of accumulators of 13 bits sums them."""
    found: dict[str, dict[int, float]] = {"one accumulator": {}, "a fresh one every 128 keys": {}}
    for keys in (128, 512, 2048, 8192, 32768, 131072):
        weights, values = flat_rows(keys)
        want = weights.double() @ values.double()
        for label, flush in zip(found, (None, 128), strict=True):
            off = (product(weights, values, flush=flush) - want).abs().sum() / want.abs().sum()
            found[label][keys] = _rounded(float(off))
    return draw.lengths(found)


def weights() -> Any:
    """Tiles of 64 of 1,024 tokens, taken by `Sparge`."""
    panels = {}
    index = torch.arange(1024) // 64
    for kind, title in {"near": "tokens that wander", "topics": "topics", "sink": "a key all want"}.items():
        q, k, _ = scene(kind)
        held = tile_masses(q, k, index, index)[0, 0]
        select = tilewise.Select(tilewise.Sparge(0.9, 0.3), block=64)
        panels[title] = (held.numpy(), tilewise.select_tiles(q, k, select).kept[0, 0].numpy())
    return draw.weights(panels)


def rest() -> Any:
    """Errors by how many tiles are taken, and by what stands for the others."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for alike, title in {1.0: "tokens of a tile alike", 0.3: "less alike"}.items():
        q, k, v = scene("topics", alike=alike)
        exact = tilewise.attention(q.double(), k.double(), v.double(), impl="reference")
        panels[title] = {far: {} for far in ("drop", "summary", "summary2")}
        for far, taken in itertools.product(panels[title], (1, 2, 4, 8, 12)):
            o = tilewise.attention(q, k, v, select=tilewise.Select(tilewise.TopK(taken), block=64, far=far))
            panels[title][far][f"{taken / 16:.0%}"] = _rounded(accuracy(o, exact).relative_l1)
    return draw.errors(panels, xlabel="tiles taken")


def windows() -> Any:
    """Windows over a grid of 8 x 6 tokens: of 3 x 3 tokens around each, and of 1 x 2 tiles of 4 x 2 tokens."""
    near = tilewise.neighborhood((8, 6), (3, 3))
    tiles = tilewise.sliding_tile((8, 6), (4, 2), (1, 2))
    return draw.tiles([_panel("neighborhood", near), _panel("sliding_tile", tiles)], BLOCK, BLOCK)


def exponents() -> Any:
    """Weights in FP8 beside 2 ** x: the nearest, and the code that is a line in x."""
    x = torch.linspace(-2.0, 0.0, 1601, dtype=torch.float64)
    weight = torch.exp2(x)
    found = {
        "the nearest code": (256 * weight).to(torch.float8_e4m3fn).double() / 256,
        "8 (x + 7) - 0.46, rounded": exponent_codes(x, 256.0, keys=len(x)),
    }
    series = {label: values.tolist() for label, values in found.items()}
    return draw.steps(x.tolist(), weight.tolist(), series, xlabel="exponent x", ylabel="weight")


DRAWN: dict[str, Callable[[], Any]] = {
    "masks.svg": masks,
    "query.svg": query,
    "ladder.svg": ladder,
    "pages.svg": pages,
    "shares.svg": shares,
    "traffic.svg": traffic,
    "roofline.svg": rooflines,
    "fusion.svg": fusion,
    "warpgroups.svg": warpgroups,
    "granularity.svg": granularity,
    "codes.svg": key_codes,
    "accumulators.svg": kept,
    "exponents.svg": exponents,
    "weights.svg": weights,
    "rest.svg": rest,
    "windows.svg": windows,
}


def write(folder: Path) -> list[Path]:
    """Draw every picture into `folder`."""
    return [draw.save(picture(), folder / name) for name, picture in DRAWN.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed pictures instead of writing")
    if not parser.parse_args().check:
        print(*write(PICTURES), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = write(Path(folder))
        stale = [
            p.name
            for p in fresh
            if not (PICTURES / p.name).exists() or (PICTURES / p.name).read_bytes() != p.read_bytes()
        ]
    print("stale: " + ", ".join(stale) if stale else "pictures are up to date")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
