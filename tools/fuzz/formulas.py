"""Masks and scores put together at random, each as the library takes it and as plain PyTorch computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tools.fuzz.case import Tensors
from tools.fuzz.draw import Draw

REACH = 8  # of the table of relative positions
Visible = Callable[[Tensors, Any, Any, Any, Any], Any]
Change = Callable[[Tensors, Any, Any, Any, Any, Any], Any]
INFINITY = float("inf")


@dataclass(frozen=True)
class Part:
    """A mask: its text, what plain PyTorch evaluates, and what the library is given, None for the same function."""

    text: str
    visible: Visible
    given: Callable[[Tensors], tw.Mask] | None = None

    def mask(self, c: Tensors) -> tw.Mask:
        """As the library takes it, over these captured tensors."""
        return tw.mask(lambda b, h, i, j: self.visible(c, b, h, i, j)) if self.given is None else self.given(c)


@dataclass(frozen=True)
class Formula:
    """A mask or none, and steps that a score takes one after another."""

    part: Part | None
    steps: tuple[tuple[str, Change], ...]

    @property
    def text(self) -> str:
        """As a person reads it."""
        steps = "; ".join(text for text, _ in self.steps)
        return f"mask {'none' if self.part is None else self.part.text}, score {steps or 'none'}"

    def arguments(self, c: Tensors) -> dict[str, Any]:
        """Of `tilewise.attention`."""
        found: dict[str, Any] = {}
        if self.part is not None:
            found["mask"] = self.part.mask(c)
        if self.steps:
            found["score"] = tw.score(lambda s, b, h, i, j: self.change(c, s, b, h, i, j))
        return found

    def change(self, c: Tensors, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        """The score after all steps."""
        for _, step in self.steps:
            s = step(c, s, b, h, i, j)
        return s

    @property
    def visible(self) -> Visible | None:
        """Of the mask."""
        return None if self.part is None else self.part.visible


def own_masks(a: int, w: int) -> dict[str, Visible]:
    """Masks as somebody may write them, over every captured tensor and most operators."""
    return {
        "i >= j": lambda c, b, h, i, j: i >= j,
        f"j <= i + {a}": lambda c, b, h, i, j: j <= i + a,
        f"abs(i - j) < {w}": lambda c, b, h, i, j: abs(i - j) < w,
        f"(i - j) % {a} == 0": lambda c, b, h, i, j: (i - j) % a == 0,
        f"i // {w} == j // {w}": lambda c, b, h, i, j: i // w == j // w,
        "j < length[b]": lambda c, b, h, i, j: j < c["length"][b],
        "second half of length": lambda c, b, h, i, j: (j >= c["length"][b] // 2) & (i >= j),
        "equal kind": lambda c, b, h, i, j: c["kind"][j] == c["kind"][i.clamp(0, len(c["kind"]) - 1)],
        "kept[j]": lambda c, b, h, i, j: c["kept"][j],
        "first[h] <= j": lambda c, b, h, i, j: c["first"][h] <= j,
        "h % 2 == 0": lambda c, b, h, i, j: h % 2 == 0,
        "(7 i + 13 j) % 5 != 0": lambda c, b, h, i, j: (i * 7 + j * 13) % 5 != 0,
        f"(i < {w}) ^ (j < {w})": lambda c, b, h, i, j: (i < w) ^ (j < w),
        "where by head": lambda c, b, h, i, j: torch.where(h % 2 == 0, i - j, j - i) <= a,
        "i * 0.5 <= j": lambda c, b, h, i, j: i * 0.5 <= j,
        f"i / 3 >= j - {w}": lambda c, b, h, i, j: i / 3 >= j - w,
        f"float(i - j) < {w}.25": lambda c, b, h, i, j: (i - j).float() < w + 0.25,
        "kind[j] <= first[h]": lambda c, b, h, i, j: c["kind"][j] <= c["first"][h],
        "(b + h) % 2 == 0": lambda c, b, h, i, j: (b + h) % 2 == 0,
        f"j != i - {a}": lambda c, b, h, i, j: j != i - a,
        f"min(i, j) % {a} == 0": lambda c, b, h, i, j: torch.minimum(i, j) % a == 0,
        "quarter[j] > 0.125": lambda c, b, h, i, j: c["quarter"][j] > 0.125,
        f"~(j == {a})": lambda c, b, h, i, j: ~(j == a),
        f"clamp(i - j, {w}) == i - j": lambda c, b, h, i, j: torch.clamp(i - j, -w, w) == i - j,
    }  # fmt: skip


def library_masks(a: int, w: int) -> list[Part]:
    """Masks by the library's names, spelled once more."""

    def seen(x: Any, i: Any, j: Any) -> Any:
        return x & (i - j == i - j)  # of the shape of all pairs

    return [
        Part("causal", lambda c, b, h, i, j: i >= j, lambda c: tw.causal),
        Part(f"window({w})", lambda c, b, h, i, j: (i - j < w) & (j <= i), lambda c: tw.window(w)),
        Part(f"window({w}, {a})", lambda c, b, h, i, j: (i - j < w) & (j - i <= a), lambda c: tw.window(w, a)),
        Part(f"window(None, {a})", lambda c, b, h, i, j: j - i <= a, lambda c: tw.window(None, a)),
        Part(f"chunked({w})", lambda c, b, h, i, j: i // w == j // w, lambda c: tw.chunked(w)),
        Part(f"sinks({a})", lambda c, b, h, i, j: seen(j < a, i, j), lambda c: tw.sinks(a)),
        Part(f"dilated({a})", lambda c, b, h, i, j: i % a == j % a, lambda c: tw.dilated(a)),
        Part("lengths", lambda c, b, h, i, j: seen(j < c["length"][b], i, j), lambda c: tw.lengths(c["length"])),
        Part("prefix", lambda c, b, h, i, j: seen(j < c["length"][b], i, j), lambda c: tw.prefix(c["length"])),
        Part("document", lambda c, b, h, i, j: c["docs"][i] == c["docs"][j], lambda c: tw.document(c["docs"])),
        Part(
            "document(ascending)",
            lambda c, b, h, i, j: c["docs"][i] == c["docs"][j],
            lambda c: tw.document(c["docs"], ascending=True),
        ),
        Part(
            "blocks(64)",
            lambda c, b, h, i, j: c["blocks"][i // 64, j // 64],
            lambda c: tw.blocks(c["blocks"], 64),
        ),
    ]


def _leaf(draw: Draw) -> Part:
    a, w = draw.kernel((1, 2, 3, 5, 16, 31)), draw.kernel((1, 3, 8, 16, 17, 64, 65, 100))
    if draw.kernel_chance(0.4):
        return draw.kernel(library_masks(a, w))
    text, visible = draw.kernel(sorted(own_masks(a, w).items()))
    return Part(text, visible)


def mask(draw: Draw, depth: int = 2) -> Part:
    """A mask, or a few joined."""
    if depth == 0 or draw.kernel_chance(0.4):
        return _leaf(draw)
    how = draw.kernel("&&|~")
    x = mask(draw, depth - 1)
    if how == "~":
        return Part(f"~({x.text})", lambda c, *at: ~x.visible(c, *at), lambda c: ~x.mask(c))
    y = mask(draw, depth - 1)
    if how == "&":
        both: Visible = lambda c, *at: x.visible(c, *at) & y.visible(c, *at)  # noqa: E731
        return Part(f"({x.text} & {y.text})", both, lambda c: x.mask(c) & y.mask(c))
    either: Visible = lambda c, *at: x.visible(c, *at) | y.visible(c, *at)  # noqa: E731
    return Part(f"({x.text} | {y.text})", either, lambda c: x.mask(c) | y.mask(c))


STEPS: dict[str, Change] = {
    "+ bias[h]": lambda c, s, b, h, i, j: s + c["bias"][h],
    "* (0.5 + 0.1 h)": lambda c, s, b, h, i, j: s * (0.5 + 0.1 * h),
    "* factor": lambda c, s, b, h, i, j: s * c["factor"],
    "/ 1.75": lambda c, s, b, h, i, j: s / 1.75,
    "- slope[h] distance": lambda c, s, b, h, i, j: s - c["bias"][h] * abs(i - j) * 0.1,
    "+ relative": lambda c, s, b, h, i, j: s + c["relative"][(i - j).clamp(-REACH, REACH) + REACH, h],
    "+ pair[i, j]": lambda c, s, b, h, i, j: s + c["pair"][i.clamp(0, len(c["pair"]) - 1), j],
    "+ place[j] bias[h]": lambda c, s, b, h, i, j: s + c["place"][j] * c["bias"][h],
    "+ 0.7 where i < j": lambda c, s, b, h, i, j: torch.where(i >= j, s, s + 0.7),
    "-inf at every third": lambda c, s, b, h, i, j: torch.where((i + j) % 3 == 0, -INFINITY, s),
    "-inf where not kept": lambda c, s, b, h, i, j: torch.where(c["kept"][j], s, -INFINITY),
    "5 tanh(s / 5)": lambda c, s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
    "sigmoid": lambda c, s, b, h, i, j: torch.sigmoid(s),
    "softplus": lambda c, s, b, h, i, j: torch.nn.functional.softplus(s),
    "clamp to 3": lambda c, s, b, h, i, j: torch.clamp(s, -3, 3),
    "- 0.05 distance": lambda c, s, b, h, i, j: s - 0.05 * abs(i - j),
    "+ log1p(distance)": lambda c, s, b, h, i, j: s + torch.log1p(abs(i - j) * 1.0),
    "+ sin": lambda c, s, b, h, i, j: s + torch.sin(0.1 * (i - j)),
    "* exp(-0.01 distance)": lambda c, s, b, h, i, j: torch.exp(-0.01 * abs(i - j)) * s,
    "0.1 s s": lambda c, s, b, h, i, j: s * s * 0.1,
    "max(s, bias[h])": lambda c, s, b, h, i, j: torch.maximum(s, c["bias"][h]),
    "abs": lambda c, s, b, h, i, j: abs(s),
    "sqrt(abs + 0.1)": lambda c, s, b, h, i, j: torch.sqrt(abs(s) + 0.1),
    "* 8": lambda c, s, b, h, i, j: s * 8.0,
    "negated": lambda c, s, b, h, i, j: -s,
    "* near[b, h, j]": lambda c, s, b, h, i, j: s * c["near"][b, h, j],
    "+ near[b, h, i]": lambda c, s, b, h, i, j: s + c["near"][b, h, i.clamp(0, c["near"].shape[2] - 1)],
    "+ request[b, h]": lambda c, s, b, h, i, j: s + c["request"][b, h],
    "+ 1 / (1 + distance)": lambda c, s, b, h, i, j: s + 1.0 / (1 + abs(i - j)),
    "silu": lambda c, s, b, h, i, j: s * s.sigmoid(),
    "+ 0.25 kind[j]": lambda c, s, b, h, i, j: s + c["kind"][j] * 0.25,
    "exp(0.2 s)": lambda c, s, b, h, i, j: torch.exp(torch.clamp(s * 0.2, -4, 4)),
    "leaky relu": lambda c, s, b, h, i, j: torch.nn.functional.relu(s) + 0.1 * s,
}
LEARNED = ("bias", "factor", "relative", "pair", "place", "near", "request")


AMPLIFY = (
    "* 8",
    "0.1 s s",
    "exp(0.2 s)",
    "* exp(-0.01 distance)",
)  # a small error of a score decides which key is seen


def formula(draw: Draw, masked: float = 0.75, scored: float = 0.6, calm: bool = False) -> Formula:
    """A mask and a score, each with this chance; a `calm` one has no step of AMPLIFY."""
    part = mask(draw) if draw.kernel_chance(masked) else None
    count = draw.kernel((1, 1, 2, 3)) if draw.kernel_chance(scored) else 0
    known = [step for step in sorted(STEPS.items()) if not (calm and step[0] in AMPLIFY)]
    steps = [draw.kernel(known) for _ in range(count)]
    steps.sort(key=lambda step: step[0].startswith("-inf"))  # else a later one may make +inf of it, and NaN of a row
    return Formula(part, tuple(steps))


def captured(draw: Draw, batch: int, heads: int, length: int) -> Tensors:
    """What the parts above read, of many dtypes and not always contiguous."""
    some = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16)
    counts = (torch.int32, torch.int64, torch.int16)

    def numbers(*shape: int) -> torch.Tensor:
        return draw.strided(draw.normal(*shape, dtype=draw.kernel(some), factor=0.5))

    def positions(below: int, *shape: int) -> torch.Tensor:
        return draw.strided(draw.integers(below, *shape, dtype=draw.kernel(counts)))

    tiles = -(-length // 64)
    return {
        "bias": numbers(heads),
        "request": numbers(batch, heads),
        "place": numbers(length),
        "pair": numbers(length, length),
        "relative": numbers(2 * REACH + 1, heads),
        "near": numbers(batch, heads, length),
        "factor": torch.tensor(0.8, device=draw.device),
        "quarter": draw.strided(draw.integers(9, length).float() / 4 - 1),
        "first": positions(min(length, 200), heads),
        "length": positions(length + 1, batch),
        "kind": positions(3, length),
        "kept": draw.strided(draw.flags(0.7, length)),
        "docs": draw.integers(2, length).cumsum(0).to(torch.int32),
        "blocks": draw.flags(0.5, tiles, tiles),
    }


def names_read(formula: Formula, c: Tensors) -> set[str]:
    """Which captured tensors the formula reads, found by having it read."""
    found: set[str] = set()

    class Noting(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            found.add(name)
            return super().__getitem__(name)

    zero = torch.zeros(1, dtype=torch.int64, device=next(iter(c.values())).device)
    if formula.part is not None:
        formula.part.visible(Noting(c), zero, zero, zero, zero)
    formula.change(Noting(c), zero.float(), zero, zero, zero, zero)
    return found
