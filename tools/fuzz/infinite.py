"""Cases with infinities and NaN: what they reach is what plain PyTorch gives, and all else is untouched."""

from __future__ import annotations

from typing import Any

import torch

from tools.fuzz import placed as places
from tools.fuzz.attention import CAUSAL, ON_CPU, Problem, plain_call, problem
from tools.fuzz.case import Case, Tensors
from tools.fuzz.draw import Draw
from tools.fuzz.formulas import Change, Formula, Part, own_masks

VALUES = (float("inf"), float("-inf"), float("nan"))
# scores of infinite products are infinite or no number, but none that every implementation rounds elsewhere
SCORES: dict[str, Change] = {
    "- slope[h] distance": lambda c, s, b, h, i, j: s - c["bias"][h] * abs(i - j) * 0.1,
    "5 tanh(s / 5)": lambda c, s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
    "-inf where not kept": lambda c, s, b, h, i, j: torch.where(c["kept"][j], s, -torch.inf),
    "+ place[j]": lambda c, s, b, h, i, j: s + c["place"][j],
}


def infinite(draw: Draw) -> Case:
    """Infinities and NaN in q, k or v, of any layout; or -inf in what a score adds, which hides.

    Values of keys that a row does not see, or whose weight is rounded to 0, may reach it or not: beside infinite ones
    there is no mask, and no large score. On a GPU, where nothing is promised of rows that meet such numbers, these are
    left out.
    """
    dtype, sizes = draw.dtype(), places.heads(draw)
    layout = draw.kernel((places.dense, places.packed, places.paged))
    where = draw.kernel(("q", "k", "k", "v", "place"))
    found = _formula(draw, where)
    made = problem(draw, sizes, dtype, layout(draw, sizes, dtype), found=found, calm=where == "v")
    if not draw.on_gpu and draw.kernel_chance(0.4):
        fused = made.placed.layout is None and not found.steps and found.part in (None, CAUSAL)
        made.options["impl"] = draw.kernel(("cpu_sdpa", *ON_CPU) if fused else ON_CPU)
    spoilt = _spoilt(draw, made, where)
    told = ", ".join(f"{value} at {place}" for place, value in spoilt)
    text = f"{where} {told or 'nothing'} {made.text}"
    if not draw.on_gpu or where == "place":
        return made.case(text=text)
    return made.case(
        library=lambda x, arguments: _apart(plain_call(x, arguments), x, made),
        plain=lambda x: _apart(made.plain(x), x, made),
        text=text,
    )


def _formula(draw: Draw, where: str) -> Formula:
    if where == "v":
        return Formula(None, ())
    masks = [CAUSAL, *(Part(text, visible) for text, visible in sorted(own_masks(3, 17).items()))]
    part = draw.kernel(masks) if draw.kernel_chance(0.6) else None
    name = "+ place[j]" if where == "place" else draw.kernel((None, None, *sorted(SCORES)))
    return Formula(part, () if name is None else ((name, SCORES[name]),))


def _spoilt(draw: Draw, made: Problem, where: str) -> list[tuple[tuple[int, ...], float]]:
    """Puts a few of VALUES there, and says where; of pages into tokens that a request has."""
    x = made.inputs[where]
    found = []
    for _ in range(draw.one((1, 1, 2, 4))):
        if not x.numel():
            break
        place = tuple(draw.sizes.randrange(size) for size in x.shape)
        value = -torch.inf if where == "place" else draw.one(VALUES)
        if made.placed.page_size and where in "kv":
            at = _slot(draw, made)
            if at is None:
                break
            place = (*at, *place[2:])
        found.append((place, value))
    own = x.clone() if 0 in x.stride() else x  # what is expanded has one number for all
    for place, value in found:
        own[place] = value
    made.inputs[where] = own
    return found


def _slot(draw: Draw, made: Problem) -> tuple[int, int] | None:
    """The page of a token, and its slot there."""
    tokens = [(n, token) for n, (_, keys) in enumerate(made.placed.lengths) for token in range(keys)]
    if not tokens:
        return None
    request, token = draw.one(tokens)
    page, slot = divmod(token, made.placed.page_size)
    return made.placed.tables[request][page], slot


def _apart(results: Tensors, x: Tensors, made: Problem) -> Tensors:
    """Without heads of sequences that have such a number anywhere."""
    o, lse = (results[name].clone() for name in ("o", "lse"))
    group, start = made.sizes.group, 0
    for b, parts in enumerate(made.placed.sequences(x)):
        rows: Any = slice(start, start + len(parts[0])) if made.placed.packed else b
        start += len(parts[0])
        for head in range(made.sizes.kv):
            heads = slice(head * group, (head + 1) * group)
            own = (parts[0][:, heads], parts[1][:, head], parts[2][:, head])
            if all(bool(part.isfinite().all()) for part in own):
                continue
            o[rows, ..., heads, :] = 0.0
            if made.placed.packed:
                lse[heads, rows] = 0.0
            else:
                lse[rows, heads] = 0.0
    return results | {"o": o, "lse": lse}
