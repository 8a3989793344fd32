"""Cases of `tilewise.attention_with_lse`: layouts, formulas, schemes, selections, encoded pages, plans."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

import tilewise as tw
from tools.fuzz import placed as places
from tools.fuzz.case import UNIT, Case, Tensors, largest
from tools.fuzz.draw import HALVES, Draw
from tools.fuzz.exact import Rules, attend, coarse, has_kink, stacked, steepest
from tools.fuzz.formulas import LEARNED, Formula, Visible, captured, formula, library_masks, names_read
from tools.fuzz.placed import Heads, Placed

Attend = Callable[[Tensors, dict[str, Any]], Tensors]
CAUSAL = library_masks(1, 1)[0]
ON_CPU = ("cpu_tiled", "cpu_tiled", "reference")
ON_GPU = ("triton", "hopper", "triton_paged", "hopper_decode", "hopper_mixed", "triton_decode")


@dataclass
class Problem:
    """A call before it is a case: its arguments, its rules, and its tensors."""

    draw: Draw
    dtype: torch.dtype
    sizes: Heads
    placed: Placed
    formula: Formula
    rules: Rules
    inputs: Tensors
    options: dict[str, Any]

    @property
    def text(self) -> str:
        """As a person reads it."""
        options = {name: x for name, x in self.options.items() if name not in ("layout", "select")}
        sink = " sink" if "sink" in self.inputs else ""
        return f"{self.placed.text} {self.dtype} {self.sizes.text} {self.formula.text} {options}{sink}"

    def arguments(self, x: Tensors) -> dict[str, Any]:
        """Of the call with these tensors."""
        found = self.options | self.formula.arguments(x)
        if self.placed.layout is not None:
            found["layout"] = self.placed.layout
        return found | ({"sink": x["sink"]} if "sink" in x else {})

    def plain(self, x: Tensors) -> Tensors:
        """o and lse, a sequence after another."""
        return self.by(x)

    def by(self, x: Tensors, levels: dict[str, int] | None = None) -> Tensors:
        """The same; `levels` rounds q, k and v of each sequence to so many steps on each side of 0."""
        parts = []
        for b, (q, k, v) in enumerate(self.placed.sequences(x)):
            if levels:
                q, k, v = (coarse(y, levels[name]) for name, y in (("q", q), ("k", k), ("v", v)))
            parts.append(attend(q, k, v, self.rules, b, x, x.get("sink")))
        if not parts:
            q, dim = x["q"], self.sizes.dim_v
            rows = (self.sizes.q, 0) if self.placed.packed else (0, self.sizes.q, q.shape[1])
            return {"o": q.new_zeros(*q.shape[:-1], dim), "lse": q.new_zeros(rows)}
        return stacked(parts, self.placed.packed)

    def case(self, library: Attend | None = None, **more: Any) -> Case:
        """The case; `library` is called with the tensors and the arguments."""
        run = library or plain_call
        made: dict[str, Any] = {
            "text": self.text,
            "dtype": self.dtype,
            "inputs": self.inputs,
            "library": lambda x: run(x, self.arguments(x)),
            "plain": self.plain,
            "terms": max(1, sum(k for _, k in self.placed.lengths)) * self.sizes.group,
            "floor": self.floor,
        }
        return Case(**{**made, **more})

    def steepest(self) -> float:
        """Of all sequences."""
        x = {name: y.detach() for name, y in self.inputs.items()}
        found = [steepest(q, k, self.rules, b, x) for b, (q, k, _) in enumerate(self.placed.sequences(x))]
        return max([0.0, *found])

    @functools.cached_property
    def has_kink(self) -> bool:
        """Of some sequence."""
        x = {name: y.detach() for name, y in self.inputs.items()}
        return any(has_kink(q, k, self.rules, b, x) for b, (q, k, _) in enumerate(self.placed.sequences(x)))

    def floor(self, name: str, truth: Tensors) -> float:
        """A backward that reads o as it was rounded has a delta that is off by that; sums of all rows add it up. Where
        rounding decides a derivative there is nothing to compare.
        """
        unit = UNIT[self.dtype]
        if name in ("o", "lse"):
            return 2 * unit if name == "lse" and self.formula.steps else 0.0
        if name != "dv" and self.has_kink:
            return math.inf
        size = largest(truth[name])
        o = truth["o"].detach().abs().nan_to_num()
        if not o.numel():
            return 0.0
        if name in ("dq", "dk", "dv"):
            delta = 3.0 * float(o.sum(-1).max())  # incoming gradients are normal, most below 3
            reach = max(largest(self.inputs["q"]), largest(self.inputs["k"]))
            rows = 1.0 if name == "dq" else math.sqrt(self.sizes.group * max([1, *(q for q, _ in self.placed.lengths)]))
            steep = max(1.0, self.steepest()) if name != "dv" else 1.0
            return unit * abs(self.rules.scale) * (16 * (1 + size) + 2 * delta * reach * rows * steep)
        everything = float(o.sum())
        return 4 * unit * everything + 4 * UNIT[torch.float32] * (1 + everything) * (self.dtype != torch.float64)


def plain_call(x: Tensors, arguments: dict[str, Any]) -> Tensors:
    """The call as users make it."""
    o, lse = tw.attention_with_lse(x["q"], x["k"], x["v"], **arguments)
    return {"o": o, "lse": lse}


def problem(
    draw: Draw, sizes: Heads, dtype: torch.dtype, placed: Placed, *, found: Formula | None = None, calm: bool = False
) -> Problem:
    """A formula over what lies there, with the tensors that it reads, a scale (where `calm` the usual one) and maybe a
    sink.
    """
    found = formula(draw) if found is None else found
    around = captured(draw, max(1, len(placed.lengths)), sizes.q, placed.longest)
    inputs = placed.inputs | {name: around[name] for name in sorted(names_read(found, around))}
    scale = None if calm else draw.kernel((None, None, 0.3, -0.2, 1.0))
    if draw.kernel_chance(0.25):
        inputs["sink"] = draw.normal(sizes.q, dtype=draw.one((torch.float32, dtype)))
        if draw.chance(0.2):
            inputs["sink"][0] = -torch.inf
    rules = Rules(sizes.dim**-0.5 if scale is None else scale, found.visible, found.change if found.steps else None)
    return Problem(draw, dtype, sizes, placed, found, rules, inputs, {} if scale is None else {"scale": scale})


def with_gradients(made: Problem) -> dict[str, Any]:
    """Leaves of a case, and the results that they get gradients of."""
    learned = [name for name in (*LEARNED, "sink") if name in made.inputs and made.draw.chance(0.6)]
    into = made.draw.one((("o",), ("o",), ("o", "lse")))
    return {"leaves": ("q", "k", "v", *learned), "into": into}


def _impl(made: Problem) -> None:
    """Now and then an implementation by name, which may refuse."""
    if made.draw.kernel_chance(0.3):
        made.options["impl"] = made.draw.kernel(ON_GPU if made.draw.on_gpu else ON_CPU)


def _in_rows(draw: Draw, layout: Callable[[Draw, Heads, torch.dtype], Placed]) -> Case:
    dtype, sizes = draw.dtype(), places.heads(draw)
    made = problem(draw, sizes, dtype, layout(draw, sizes, dtype))
    dropout = draw.kernel((0.0, 0.0, 0.0, 0.1, 0.5))
    if dropout:
        seed = draw.sizes.randrange(2**62)
        made.rules = replace(made.rules, dropout=dropout, seed=seed)
        made.options |= {"dropout": dropout, "seed": seed}
    _impl(made)
    repeats = draw.chance(0.3)
    if repeats:
        made.options["deterministic"] = True
    return made.case(repeats=repeats, **(with_gradients(made) if draw.kernel_chance(0.6) else {}))


def dense(draw: Draw) -> Case:
    """Rows of one length."""
    return _in_rows(draw, places.dense)


def packed(draw: Draw) -> Case:
    """Sequences one after another."""
    return _in_rows(draw, places.packed)


def paged(draw: Draw) -> Case:
    """Keys in pages."""
    dtype, sizes = draw.dtype(), places.heads(draw)
    made = problem(draw, sizes, dtype, places.paged(draw, sizes, dtype))
    if draw.chance(0.15):
        made.options["batch_invariant"] = True
    _impl(made)
    return made.case()


def shared(draw: Draw) -> Case:
    """Requests that begin with the same pages, which may be read once for all."""
    dtype, sizes = draw.dtype(wide=False), places.heads(draw)
    plainly = Formula(draw.kernel((None, CAUSAL)), ())
    return problem(draw, sizes, dtype, places.paged(draw, sizes, dtype, shared=True), found=plainly).case()


SCHEMES: dict[str, tuple[Callable[[], Any], int]] = {
    "Sage1": (tw.Sage1, 127),
    "Sage2": (tw.Sage2, 127),
    "Sage2pp": (tw.Sage2pp, 127),
    "Sage2 of 4 bits": (lambda: tw.Sage2("int4"), 7),
    "Sage of fp8": (lambda: tw.Sage("fp8"), 16),
    "FP8 by block": (lambda: tw.FP8("block", "block", "block"), 16),
    "FA3FP8": (tw.FA3FP8, 16),
}  # and how many steps each side of 0 has, at least: fp8 has 16 in its last octave


def codes(draw: Draw) -> Case:
    """Attention in few bits: not farther off than twice what one scale for each head would give."""
    dtype = draw.kernel(HALVES)
    sizes = places.heads(draw)
    name, (scheme, levels) = draw.kernel(sorted(SCHEMES.items(), key=lambda item: item[0]))
    layout = draw.kernel((places.dense, places.packed, places.paged))
    found = formula(draw, 0.6, 0.3, calm=True)
    made = problem(draw, sizes, dtype, layout(draw, sizes, dtype), found=found, calm=True)
    made.options["quantize"] = scheme()

    def floor(result: str, truth: Tensors) -> float:
        return made.floor(result, truth) + 0.04 * (1 + largest(truth[result]))

    return made.case(
        rough=lambda x: made.by(x, {"q": levels, "k": levels, "v": 16}), floor=floor, text=f"{name} {made.text}"
    )


WEIGHTS = {"fp8": 2.0**-4, "fp16": 2.0**-11, "bf16": 2.0**-8}  # what rounding changes a weight by, relatively, at most


def codes_gradients(draw: Draw) -> Case:
    """Quantized attention: its gradients are those of exact attention over the dequantized q, k and v."""
    dtype, sizes = draw.kernel(HALVES), places.heads(draw)
    sizes = replace(sizes, dim=min(256, sizes.dim), dim_v=min(256, sizes.dim_v))
    name, (scheme, _) = draw.kernel(sorted(SCHEMES.items(), key=lambda item: item[0]))
    layout = draw.kernel((places.dense, places.packed))
    found = formula(draw, 0.5, 0.2, calm=True)
    made = problem(draw, sizes, dtype, layout(draw, sizes, dtype), found=found, calm=True)
    made.options["quantize"] = scheme()
    rows = made.placed.layout
    assert not isinstance(rows, tw.Paged)
    q, k, v = (made.inputs[side] for side in "qkv")
    numbers = tw.quantize_qkv(q, k, v, scheme=scheme(), layout=rows).whole(torch.float32)
    weight = WEIGHTS[scheme().pv] + 4 * UNIT[dtype]

    def straight_through(x: Tensors) -> Tensors:
        pairs = zip("qkv", numbers, strict=True)
        return made.plain(x | {side: x[side] + (y.to(x[side].dtype) - x[side]).detach() for side, y in pairs})

    def floor(result: str, truth: Tensors) -> float:
        size = largest(truth[result])
        if result in ("o", "lse"):
            # means of queries met keys as they were given: `codes` has looked at that
            return made.floor(result, truth) + (1.0 if "q" in scheme().smooth else 2 * weight) * (1 + size)
        return weight * (1 + size)

    more = with_gradients(made)
    return made.case(
        plain=straight_through, rough=straight_through, floor=floor, text=f"{name} {made.text}", **more
    )  # fmt: skip


def selected(draw: Draw) -> Case:
    """Attention over the tiles that `select_tiles` has taken, given the tiles or what chose them."""
    dtype, sizes = draw.dtype(), places.heads(draw)
    layout = draw.kernel((places.dense, places.dense, places.packed, places.paged))
    placed = layout(draw, sizes, dtype)
    found = formula(draw, 0.7, 0.3) if layout is places.dense else Formula(draw.kernel((None, CAUSAL)), ())
    made = problem(draw, sizes, dtype, placed, found=found)
    choices: tuple[Any, ...] = (tw.TopK(0.5), tw.TopK(2), tw.Sparge(0.9, 0.3), tw.Threshold(0.05))
    select = draw.kernel(choices)
    given = {name: x for name, x in made.arguments(made.inputs).items() if name in ("mask", "score", "scale", "layout")}
    taken = tw.select_tiles(made.inputs["q"], made.inputs["k"], select, **given)
    made.rules = replace(made.rules, visible=_in_tiles(taken, made))
    made.options["select"] = draw.one((taken, select))
    more = with_gradients(made) if layout is not places.paged and draw.kernel_chance(0.4) else {}
    text = f"{select}{' as tiles' if made.options['select'] is taken else ''} {made.text}"
    return made.case(text=text, **more)


def _in_tiles(taken: tw.Selected, made: Problem) -> Visible:
    """The mask, of pairs in tiles that are taken; tiles of packed sequences begin where `Selected` says."""
    (rows, columns), inner, lengths = taken.block, made.rules.visible, made.placed.lengths
    each, apart = made.sizes.q // taken.kept.shape[1], taken.layout is not None
    totals_q, totals_k = ([0, *accumulate(pair[n] for pair in lengths)] for n in (0, 1))

    def visible(c: Tensors, b: Any, h: Any, i: Any, j: Any) -> Any:
        place = int(b)
        first_q, first_k = totals_q[place] // rows + place, totals_k[place] // columns + place
        row = (i - (lengths[place][1] - lengths[place][0])) // rows
        if apart:
            near = taken.kept[0, h // each, row + first_q, j // columns + first_k]
        else:
            near = taken.kept[place % len(taken.kept), h // each, row, j // columns]
        return near if inner is None else near & inner(c, b, h, i, j)

    return visible
