"""Cases of pages: codes in them, what is written and copied there, and calls that are planned once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import tilewise as tw
from tilewise.quant import ByChannel, Encoded, encode, encode_by_channel
from tilewise.testing.graphs import captured as graph_of
from tools.fuzz import placed as places
from tools.fuzz.attention import Problem, problem
from tools.fuzz.case import Case, Tensors
from tools.fuzz.draw import HALVES, PAGE_SIZES, Draw
from tools.fuzz.exact import numbers_by_channel, numbers_of, turned
from tools.fuzz.formulas import formula

NO_FLOAT64 = (*HALVES, *HALVES, torch.float32)


def _even(sizes: places.Heads) -> places.Heads:
    return replace(sizes, dim=-(-sizes.dim // 4) * 4, dim_v=-(-sizes.dim_v // 4) * 4)


def _over_codes(draw: Draw, by_channel: bool) -> Case:
    """Attention over pages of codes; the pages are written here, by the library, and read back by other means."""
    dtype, sizes = draw.kernel(NO_FLOAT64), _even(places.heads(draw))
    placed = places.paged(draw, sizes, dtype, finite=True)
    made = problem(draw, sizes, dtype, placed, found=formula(draw, 0.6, 0.3))
    k, v = made.inputs.pop("k"), made.inputs.pop("v")
    kind = draw.kernel(("int8", "fp8", "int4"))
    kept: dict[str, Encoded] = {"v": encode(v, kind)}
    made.inputs |= {"v codes": kept["v"].data, "v scale": kept["v"].scale}
    bits = draw.kernel((4, 2))
    if by_channel:
        made.inputs |= _channels(draw, k, bits, [table[-1] for table in placed.tables if table])
    else:
        kept["k"] = encode(k, kind)
        made.inputs |= {"k codes": kept["k"].data, "k scale": kept["k"].scale}

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        if by_channel:
            keys: Encoded | ByChannel = ByChannel(*(x[f"k {name}"] for name in CHANNELS))
        else:
            keys = Encoded(x["k codes"], x["k scale"])
        o, lse = tw.attention_with_lse(x["q"], keys, Encoded(x["v codes"], x["v scale"]), **arguments)
        return {"o": o, "lse": lse}

    def plain(x: Tensors) -> Tensors:
        values = numbers_of(x["v codes"], x["v scale"])
        if by_channel:
            keys = numbers_by_channel(*(x[f"k {name}"] for name in CHANNELS))
        else:
            keys = numbers_of(x["k codes"], x["k scale"])
        return made.plain(x | {"k": keys.to(x["q"].dtype), "v": values.to(x["q"].dtype)})

    what = f"keys by channel, {bits} bits" if by_channel else kind
    return made.case(library, plain=plain, text=f"{what} {made.text}", floor=lambda name, truth: 0.0)


CHANNELS = ("data", "scale", "least", "open", "place")


def _channels(draw: Draw, k: torch.Tensor, bits: int, last: list[int]) -> Tensors:
    """Codes of all pages but for some of the last ones, which are open."""
    full = encode_by_channel(k, bits)
    opened = [page for page in last if draw.chance(0.6)]
    place = full.place.clone()
    for row, page in enumerate(opened):
        place[page] = row
    rows = k[opened] if opened else full.open
    found = {"data": full.data, "scale": full.scale, "least": full.least, "open": rows, "place": place}
    return {f"k {name}": x for name, x in found.items()}


def encoded(draw: Draw) -> Case:
    """Keys and values as codes with a scale for each row."""
    return _over_codes(draw, by_channel=False)


def channels(draw: Draw) -> Case:
    """Keys as codes with a scale for each channel of a page."""
    return _over_codes(draw, by_channel=True)


def planned(draw: Draw) -> Case:
    """A plan made for other lengths, run twice, and updated; on a GPU also replayed from a CUDA graph."""
    dtype, sizes = draw.kernel(NO_FLOAT64), places.heads(draw)
    shared = draw.kernel_chance(0.2)
    placed = places.paged(draw, sizes, dtype, finite=True, shared=shared)
    plainly = shared or draw.kernel_chance(0.2)
    made = problem(draw, sizes, dtype, placed, found=formula(draw, 0.0 if plainly else 0.6, 0.0 if plainly else 0.4))
    if draw.chance(0.2) and not shared:
        made.options["batch_invariant"] = True
    in_graph = draw.on_gpu and draw.chance(0.5)
    return made.case(lambda x, arguments: _through_a_plan(made, x, arguments, in_graph))


def _through_a_plan(made: Problem, x: Tensors, arguments: dict[str, Any], in_graph: bool) -> Tensors:
    layout, sink = arguments["layout"], x.get("sink")
    lengths = torch.zeros_like(layout.seqlens_k)  # what it is planned for; then they change in place
    least = [min(q, k) for q, k in made.placed.lengths]
    lengths.copy_(torch.tensor(least, dtype=torch.int32))
    plan = tw.plan(x["q"], x["k"], x["v"], **arguments | {"layout": replace(layout, seqlens_k=lengths)})
    plan.run(x["q"], x["k"], x["v"], sink=sink)
    lengths.copy_(layout.seqlens_k)
    plan.update()
    if in_graph:
        graph, results = graph_of(lambda: plan.run_with_lse(x["q"], x["k"], x["v"], sink=sink))
        graph.replay()
        return dict(zip(("o", "lse"), results, strict=True))
    plan.run_with_lse(x["q"], x["k"], x["v"], sink=sink)
    o, lse = plan.run_with_lse(x["q"], x["k"], x["v"], sink=sink)
    return {"o": o, "lse": lse}


def write(draw: Draw) -> Case:
    """New keys and values into slots, as they are, turned, or encoded."""
    dtype, sizes = draw.kernel(NO_FLOAT64), _even(places.heads(draw))
    size, pages = draw.kernel(PAGE_SIZES), draw.one((1, 2, 5, 9))
    tokens = min(size * pages, draw.one((0, 1, 3, 17, 64)))
    slots = torch.randperm(size * pages, generator=draw.generator)[:tokens]
    slots = torch.where(torch.rand(tokens, generator=draw.generator) < 0.1, -1, slots)
    kind = draw.kernel((None, None, "int8", "fp8", "int4"))
    new = {
        "k": draw.rows((tokens, sizes.kv, sizes.dim), dtype, draw.kernel(("plain", "padded", "odd"))),
        "v": draw.rows((tokens, sizes.kv, sizes.dim_v), dtype, draw.kernel(("plain", "padded", "odd"))),
        "slots": slots.to(draw.kernel((torch.int32, torch.int64))).to(draw.device),
    }
    pools = {
        f"{name} pages": draw.rows((pages, size, sizes.kv, dim), dtype, draw.kernel(("plain", "heads first", "padded")))
        for name, dim in (("k", sizes.dim), ("v", sizes.dim_v))
    }
    turning = draw.kernel_chance(0.4)
    if turning:
        new |= _angles(draw, sizes.dim, tokens)
    interleaved = draw.kernel((True, False))
    if kind is not None:
        codes = {name: encode(x, kind) for name, x in pools.items()}
        pools = {name: x.data for name, x in codes.items()} | {f"{name} scale": x.scale for name, x in codes.items()}

    def library(x: Tensors) -> Tensors:
        rope = tw.Rope(x["cos"], x["sin"], x["positions"], interleaved) if turning else None
        if kind is None:
            tw.kv_write(x["k"], x["v"], x["k pages"], x["v pages"], x["slots"], rope=rope)
            return {name: x[f"{name} pages"].clone() for name in "kv"}
        into = [Encoded(x[f"{name} pages"], x[f"{name} pages scale"]) for name in "kv"]
        tw.kv_write(x["k"], x["v"], into[0], into[1], x["slots"], rope=rope)
        return {name: numbers_of(one.data, one.scale) for name, one in zip("kv", into, strict=True)}

    def plain(x: Tensors) -> Tensors:
        keys = turned(x["k"], x["cos"], x["sin"], x["positions"], interleaved) if turning else x["k"]
        found = {}
        for name, rows in (("k", keys), ("v", x["v"])):
            pool = x[f"{name} pages"]
            pool = pool.clone() if kind is None else numbers_of(pool, x[f"{name} pages scale"].to(rows.dtype))
            for token, slot in enumerate(x["slots"].tolist()):
                if slot >= 0:
                    pool[slot // size, slot % size] = rows[token]
            found[name] = pool
        return found

    def floor(name: str, truth: Tensors) -> float:
        """Half a step of a row's codes; e4m3 has three bits behind the point."""
        step = {None: 0.0, "int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 1 / 16}[kind]
        return step * float(truth[name].abs().nan_to_num().max()) * 1.01 if truth[name].numel() else 0.0

    as_it_is = ("k", "v") if kind is None and not turning else ("v",) if kind is None else ()
    text = f"{tokens} tokens into {pages} pages of {size}, {dtype} {sizes.text}, codes {kind}, turned {turning}"
    changed = tuple(pools)
    return Case(text, dtype, new | pools, library, plain, floor=floor, exact=as_it_is, changed=changed)


def _angles(draw: Draw, dim: int, tokens: int) -> Tensors:
    pairs, most = max(1, draw.kernel((dim // 2, dim // 4))), 50
    angles = draw.normal(most, pairs, factor=2.0)
    return {"cos": angles.cos(), "sin": angles.sin(), "positions": draw.integers(most, tokens)}


def copy(draw: Draw) -> Case:
    """Pages onto others."""
    dtype, sizes = draw.kernel(NO_FLOAT64), _even(places.heads(draw))
    size, pages = draw.kernel(PAGE_SIZES), draw.one((2, 5, 12))
    order = torch.randperm(pages, generator=draw.generator).tolist()
    count = draw.one(range(pages // 2 + 1))
    pairs = [(order[0] if draw.chance(0.3) else order[n], order[pages - 1 - n]) for n in range(count)]
    pairs = [(-1, b) if draw.chance(0.1) else (a, b) for a, b in pairs]
    inputs = {
        name: draw.rows((pages, size, sizes.kv, dim), dtype, draw.kernel(("plain", "heads first", "padded")))
        for name, dim in (("k", sizes.dim), ("v", sizes.dim_v))
    }
    inputs["pairs"] = torch.tensor(pairs, dtype=torch.int64, device=draw.device).reshape(count, 2)

    def library(x: Tensors) -> Tensors:
        tw.copy_pages(x["k"], x["v"], x["pairs"])
        return {name: x[name].clone() for name in "kv"}

    def plain(x: Tensors) -> Tensors:
        found = {name: x[name].clone() for name in "kv"}
        for pool in found.values():
            for source, target in pairs:
                if min(source, target) >= 0:
                    pool[target] = pool[source].clone()
        return found

    text = f"{pairs} of {pages} pages of {size}, {dtype} {sizes.text}"
    return Case(text, dtype, inputs, library, plain, exact=("k", "v"), changed=("k", "v"))
