"""Cases of what transformers calls in each attention layer: its conventions, written out here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from tilewise.adapters import transformers as adapter
from tools.fuzz import placed as places
from tools.fuzz.attention import Problem
from tools.fuzz.case import Case, Tensors
from tools.fuzz.draw import Draw
from tools.fuzz.exact import Rules
from tools.fuzz.formulas import Change, Formula, Visible

KINDS = ("nothing", "padding", "bool", "float", "documents", "prepared")
WINDOW = 5


def transformers(draw: Draw) -> Case:
    """attention_forward under every kind of mask that it takes, with a softcap, sinks and a position bias.

    One that transformers prepares is left out where that is not installed.
    """
    dtype, sizes = draw.dtype(), places.heads(draw)
    kind = draw.kernel(KINDS if find_spec("transformers") else KINDS[:-1])
    placed = places.dense(draw, sizes, dtype, batch=1 if kind == "documents" else None)
    if kind == "documents":
        placed = _as_many_queries(draw, sizes, dtype)
    batch, rows, keys = len(placed.lengths), placed.inputs["q"].shape[1], placed.inputs["k"].shape[1]
    scale = draw.kernel((None, None, 0.3))
    causal, window = draw.kernel((True, False)), draw.kernel((None, None, WINDOW))
    options: dict[str, Any] = {"scaling": scale, "is_causal": causal, "softcap": draw.kernel((None, None, 5.0))}
    options["sliding_window"] = window if kind in ("nothing", "padding", "documents") else None
    more, visible = _mask(draw, kind, (batch, sizes.q, rows, keys), dtype, causal, options["sliding_window"])
    if draw.kernel_chance(0.3):
        more["bias"] = draw.normal(draw.one((1, batch)) if batch else 1, sizes.q, rows, keys, dtype=dtype)
    if draw.kernel_chance(0.3):
        more["sink"] = draw.normal(sizes.q, dtype=dtype)
    change = _change(options["softcap"], kind, "bias" in more, keys - rows)
    rules = Rules(sizes.dim**-0.5 if scale is None else scale, visible, change)
    made = Problem(draw, dtype, sizes, placed, Formula(None, ()), rules, placed.inputs | more, {})

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        given = options | {"s_aux": x.get("sink"), "position_bias": x.get("bias"), "cu_seq_lens_q": x.get("starts")}
        mask = x.get("table")
        if kind == "prepared":
            mask = _prepared(draw, x["kept"], rows, keys)
        o, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, mask, **given)
        return {"o": o}

    learned = [name for name in ("sink", "bias") if name in more]
    leaves = ("q", "k", "v", *learned) if draw.kernel_chance(0.5) else ()
    text = f"{kind} {options} {sorted(more)} {made.text}"
    return made.case(library, plain=lambda x: {"o": made.plain(x)["o"]}, leaves=leaves, into=("o",), text=text)


def _as_many_queries(draw: Draw, sizes: places.Heads, dtype: torch.dtype) -> places.Placed:
    rows = draw.length()
    inputs = {
        name: draw.rows((1, rows, n, dim), dtype, "plain")
        for name, n, dim in (("q", sizes.q, sizes.dim), ("k", sizes.kv, sizes.dim), ("v", sizes.kv, sizes.dim_v))
    }
    text = f"dense 1 x {rows}, {rows}"
    return places.Placed(
        text, inputs, None, [(rows, rows)], lambda x: [(x["q"][0], x["k"][0], x["v"][0])], packed=False
    )  # fmt: skip


def _mask(
    draw: Draw, kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, causal: bool, window: int | None
) -> tuple[Tensors, Visible | None]:
    """The tensors of a mask, and which pairs it lets meet."""
    batch, heads, rows, keys = shape
    shift = keys - rows

    def near(c: Tensors, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Queries stand at the last keys."""
        seen = (j <= i) if causal else (j == j) & (i == i)
        return seen if window is None else seen & (abs(i - j) < window)

    if kind == "nothing":
        if window is not None:
            return {}, near
        # then queries stand at the first keys, and a single one sees all
        return {}, (lambda c, b, h, i, j: j <= i - shift) if causal and rows > 1 else None
    if kind == "padding":
        kept = draw.flags(0.8, batch, keys + draw.one((0, 0, 3)))
        table = kept if draw.kernel_chance(0.5) else kept.to(draw.kernel((torch.int64, torch.float32)))
        return {"table": table}, lambda c, b, h, i, j: near(c, b, h, i, j) & c["table"].bool()[b, -keys:][j]
    if kind in ("bool", "float"):
        table = draw.flags(0.7, draw.one((1, batch)) if batch else 1, draw.one((1, heads)), rows, keys)
        table = torch.cat([table, table[..., :2]], -1) if draw.chance(0.2) else table  # of keys to come
        if kind == "float":
            added = draw.normal(*table.shape, dtype=dtype)
            table = torch.where(table, added, torch.finfo(dtype).min)
        return {"table": table}, lambda c, b, h, i, j: _seen(_at(c["table"], shape, b, h, i, j))
    if kind == "documents":
        lengths = [0]
        while lengths[-1] < rows:
            lengths.append(min(rows, lengths[-1] + draw.one((1, 3, 20, rows))))
        starts = draw.ints(lengths)
        top_left = near if window is not None else (lambda c, b, h, i, j: (j <= i) if causal else (i - j == i - j))
        return {
            "starts": starts
        }, lambda c, b, h, i, j: top_left(c, b, h, i, j) & (_document(c["starts"], i) == _document(c["starts"], j))
    kept = draw.flags(0.8, batch, keys)
    return {"kept": kept}, lambda c, b, h, i, j: (j <= i) & (abs(i - j) < WINDOW) & c["kept"][b][j]


def _seen(table: torch.Tensor) -> torch.Tensor:
    """The most negative number of a dtype hides."""
    return table if table.dtype == torch.bool else table > -1e4


def _document(starts: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(starts[1:].long(), place.contiguous().long(), right=True)


def _at(table: torch.Tensor, shape: tuple[int, int, int, int], *at: Any) -> torch.Tensor:
    """Of a table of queries that are counted from 0."""
    b, h, i, j = at
    batch, heads, rows, keys = shape
    return table[..., :keys].expand(batch, heads, rows, keys)[b, h, i - (keys - rows), j]


def _change(softcap: float | None, kind: str, biased: bool, shift: int) -> Change | None:
    if not (softcap or biased or kind == "float"):
        return None

    def change(c: Tensors, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        shape = (int(b) + 1, s.shape[0], s.shape[1], s.shape[2])
        if kind == "float":
            table = c["table"] if c["table"].shape[0] == 1 else c["table"][: int(b) + 1]
            s = s + torch.where(_seen(_at(table, shape, b, h, i, j)), _at(table, shape, b, h, i, j), 0.0)
        if biased:
            bias = c["bias"] if c["bias"].shape[0] == 1 else c["bias"][: int(b) + 1]
            s = s + _at(bias, shape, b, h, i, j)
        return s

    return change


def _prepared(draw: Draw, kept: torch.Tensor, rows: int, keys: int) -> Any:
    """What transformers makes of a sliding window and padding, for queries behind a cache."""
    return adapter.attention_mask(
        kept.shape[0], rows, keys, keys - rows, 0, lambda b, h, q, k: (k <= q) & (abs(q - k) < WINDOW),
        attention_mask=kept, device=draw.device,
    )  # fmt: skip
