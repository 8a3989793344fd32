"""Cases of the interfaces of others: what they mean is written out here, from their own documentation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tilewise.adapters import flash_attn, flashinfer, flex, sageattention, sdpa
from tools.fuzz import placed as places
from tools.fuzz.attention import Problem
from tools.fuzz.case import Case, Tensors, largest
from tools.fuzz.draw import HALVES, Draw
from tools.fuzz.exact import Rules, turned
from tools.fuzz.formulas import Change, Formula, Visible
from tools.fuzz.placed import Heads, Placed

NO_FORMULA = Formula(None, ())
NO_FLOAT64 = (*HALVES, *HALVES, torch.float32)


def _problem(draw: Draw, dtype: torch.dtype, sizes: Heads, placed: Placed, rules: Rules, more: Tensors) -> Problem:
    return Problem(draw, dtype, sizes, placed, NO_FORMULA, rules, placed.inputs | more, {})


def _heads_first(x: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x["q"].transpose(1, 2), x["k"].transpose(1, 2), x["v"].transpose(1, 2)


def _scale(draw: Draw, dim: int) -> tuple[float | None, float]:
    scale = draw.kernel((None, None, 0.3))
    return scale, dim**-0.5 if scale is None else scale


def torch_sdpa(draw: Draw) -> Case:
    """scaled_dot_product_attention: no mask, a causal one from the first key on, or a tensor."""
    dtype, sizes = draw.dtype(), places.heads(draw)
    placed = places.dense(draw, sizes, dtype)
    batch, rows, keys = len(placed.lengths), placed.inputs["q"].shape[1], placed.inputs["k"].shape[1]
    kind, (scale, factor) = draw.kernel(("none", "causal", "bool", "float")), _scale(draw, sizes.dim)
    rules, more = Rules(factor, shift=0), {}
    if kind == "causal":
        rules = replace(rules, visible=lambda c, b, h, i, j: j <= i)
    shape = draw.kernel(((batch, sizes.q, rows, keys), (1, sizes.q, rows, keys), (batch, 1, 1, keys), (rows, keys)))
    if kind == "bool":
        more["table"] = draw.flags(0.7, *shape)
        rules = replace(rules, visible=lambda c, b, h, i, j: _at(c["table"], batch, sizes.q, rows, keys, b, h, i, j))
    if kind == "float":
        more["table"] = draw.normal(*shape, dtype=dtype)
        rules = replace(
            rules, change=lambda c, s, b, h, i, j: s + _at(c["table"], batch, sizes.q, rows, keys, b, h, i, j)
        )
    made = _problem(draw, dtype, sizes, placed, rules, more)

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        found = sdpa.scaled_dot_product_attention(
            *_heads_first(x), x.get("table"), is_causal=kind == "causal", scale=scale, enable_gqa=sizes.group > 1
        )
        return {"o": found.transpose(1, 2)}

    leaves = ("q", "k", "v", *(["table"] if kind == "float" else ())) if draw.kernel_chance(0.5) else ()
    text = f"{kind} {shape if more else ''} scale {scale} {made.text}"
    return made.case(library, plain=lambda x: {"o": made.plain(x)["o"]}, leaves=leaves, into=("o",), text=text)


def _at(table: torch.Tensor, batch: int, heads: int, rows: int, keys: int, *at: Any) -> torch.Tensor:
    b, h, i, j = at
    return table.expand(batch, heads, rows, keys)[b, h, i, j]


def _flash_rules(draw: Draw, sizes: Heads, batch: int) -> tuple[dict[str, Any], Rules, Tensors]:
    """Options of FlashAttention's functions, and what they mean."""
    scale, factor = _scale(draw, sizes.dim)
    causal, softcap = draw.kernel_chance(0.5), draw.kernel((0.0, 0.0, 5.0))
    left, right = draw.kernel(((-1, -1), (-1, -1), (7, 0), (16, 3), (-1, 5)))
    options = {"softmax_scale": scale, "causal": causal, "window_size": (left, right), "softcap": softcap}
    right = 0 if causal else right
    more: Tensors = {}
    if draw.kernel_chance(0.3):
        more["slopes"] = draw.normal(*draw.kernel(((sizes.q,), (batch, sizes.q)))).abs()

    def visible(c: Tensors, b: Any, h: Any, i: Any, j: Any) -> Any:
        near = (j <= i + right) if right >= 0 else (j == j)
        return near & (j >= i - left) if left >= 0 else near & (i == i)

    def change(c: Tensors, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if "slopes" not in c:
            return s
        slope = c["slopes"][h] if c["slopes"].ndim == 1 else c["slopes"][b, h]
        return s - slope * abs(i - j)

    return options, Rules(factor, visible, change), more


def _flash_lse(found: Tensors) -> Tensors:
    """An empty row has +inf there."""
    return {"o": found["o"], "lse": torch.where(found["lse"] == -torch.inf, torch.inf, found["lse"])}


def flash(draw: Draw) -> Case:
    """flash_attn_func, and flash_attn_varlen_func of packed rows."""
    dtype, sizes = draw.kernel(NO_FLOAT64), places.heads(draw)
    layout = draw.kernel((places.dense, places.packed))
    placed = layout(draw, sizes, dtype)
    options, rules, more = _flash_rules(draw, sizes, len(placed.lengths))
    made = _problem(draw, dtype, sizes, placed, rules, more)

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        given = options | {"alibi_slopes": x.get("slopes"), "return_attn_probs": True}
        if not placed.packed:
            found = flash_attn.flash_attn_func(x["q"], x["k"], x["v"], **given)
        else:
            first = arguments["layout"]
            most_q, most_k = (max([0, *(pair[n] for pair in placed.lengths)]) for n in (0, 1))
            found = flash_attn.flash_attn_varlen_func(
                x["q"], x["k"], x["v"], first.cu_seqlens_q, first.cu_seqlens_k, most_q, most_k, **given
            )
        return {"o": found[0], "lse": found[1]}

    leaves = ("q", "k", "v") if draw.kernel_chance(0.5) else ()
    return made.case(
        library, plain=lambda x: _flash_lse(made.plain(x)), leaves=leaves, into=("o",), text=f"{options} {made.text}"
    )


def flash_cache(draw: Draw) -> Case:
    """flash_attn_with_kvcache: new keys into a cache of rows, turned on the way, and attention to all there is then."""
    dtype, sizes = draw.kernel(NO_FLOAT64), places.heads(draw)
    sizes = replace(sizes, dim=-(-sizes.dim // 2) * 2)
    batch, rows, room = draw.one((1, 2, 3)), draw.one((1, 1, 3, 9)), draw.length() + 10
    new = rows if draw.kernel_chance(0.7) else 0
    there = [draw.one(range(room - new + 1)) for _ in range(batch)]
    if not new:
        there = [max(1, n) for n in there]
    options, rules, more = _flash_rules(draw, sizes, batch)
    turning, interleaved = bool(new) and draw.kernel_chance(0.5), draw.kernel((True, False))
    dims = {"k": sizes.dim, "v": sizes.dim_v}
    inputs = {"q": draw.rows((batch, rows, sizes.q, sizes.dim), dtype, "plain")}
    inputs |= {f"{n} cache": draw.rows((batch, room, sizes.kv, dim), dtype, "padded") for n, dim in dims.items()}
    if new:
        inputs |= {n: draw.rows((batch, new, sizes.kv, dim), dtype, "plain") for n, dim in dims.items()}
    if turning:
        angles = draw.normal(room + rows, sizes.dim // 2, factor=2.0)
        inputs |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    inputs |= more | {"there": draw.ints(there)}
    lengths = [(rows, n + new) for n in there]
    placed = Placed(
        f"cache of {batch} x {room}, there {there}, new {new}, queries {rows}, turned {turning} {interleaved}",
        inputs, None, lengths, lambda x: _cached(x, there, new, turning, interleaved, options), packed=False,
    )  # fmt: skip
    made = Problem(draw, dtype, sizes, placed, NO_FORMULA, rules, inputs, {})

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        o, lse = flash_attn.flash_attn_with_kvcache(
            x["q"], x["k cache"], x["v cache"], x.get("k"), x.get("v"), x.get("cos"), x.get("sin"),
            cache_seqlens=x["there"], rotary_interleaved=interleaved, alibi_slopes=x.get("slopes"),
            return_softmax_lse=True, **options,
        )  # fmt: skip
        return {"o": o, "lse": lse}

    return made.case(
        library,
        plain=lambda x: _flash_lse(made.plain(x)),
        changed=("k cache", "v cache"),
        floor=lambda name, truth: 0.05 * (dtype != torch.float32) * turning,  # keys are stored as they were turned
        text=f"{options} {made.text}",
    )


def _cached(
    x: Tensors, there: list[int], new: int, turning: bool, interleaved: bool, options: dict[str, Any]
) -> list[places.Sequence3]:
    found = []
    local = options["causal"] or options["window_size"] != (-1, -1)
    for r, n in enumerate(there):
        q, k, v = x["q"][r], x["k cache"][r, :n], x["v cache"][r, :n]
        if new:
            own = x["k"][r]
            if turning:
                at = torch.arange(new, device=q.device) + n
                own = turned(own, x["cos"], x["sin"], at, interleaved)
                at = torch.arange(len(q), device=q.device) + n if local else torch.full((len(q),), n, device=q.device)
                q = turned(q, x["cos"], x["sin"], at, interleaved)
            k, v = torch.cat([k, own]), torch.cat([v, x["v"][r]])
        found.append((q, k, v))
    return found


MASKS: dict[str, tuple[Any, Visible]] = {
    "causal": (lambda b, h, i, j: i >= j, lambda c, b, h, i, j: i >= j),
    "near": (lambda b, h, i, j: (i - j).abs() < 17, lambda c, b, h, i, j: abs(i - j) < 17),
    "stripes": (lambda b, h, i, j: (i + 2 * j + h) % 3 != 0, lambda c, b, h, i, j: (i + 2 * j + h) % 3 != 0),
}
SCORES: dict[str, tuple[Any, Change]] = {
    "distance": (lambda s, b, h, i, j: s - 0.1 * (i - j).abs(), lambda c, s, b, h, i, j: s - 0.1 * abs(i - j)),
    "capped": (lambda s, b, h, i, j: 4 * torch.tanh(s / 4), lambda c, s, b, h, i, j: 4 * torch.tanh(s / 4)),
    "by head": (
        lambda s, b, h, i, j: s * (1 + 0.1 * h) + 0.2 * b,
        lambda c, s, b, h, i, j: s * (1 + 0.1 * h) + 0.2 * b,
    ),
}


def torch_flex(draw: Draw) -> Case:
    """flex_attention, whose formulas count queries from 0."""
    dtype, sizes = draw.dtype(), places.heads(draw)
    placed = places.dense(draw, sizes, dtype)
    rows, keys = placed.inputs["q"].shape[1], placed.inputs["k"].shape[1]
    (scale, factor), masked, scored = _scale(draw, sizes.dim), draw.kernel((None, *MASKS)), draw.kernel((None, *SCORES))
    rules = Rules(
        factor, MASKS[masked][1] if masked else None, SCORES[scored][1] if scored else None, shift=0
    )  # fmt: skip
    made = _problem(draw, dtype, sizes, placed, rules, {})

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        block_mask = None
        if masked:
            block_mask = flex.create_block_mask(MASKS[masked][0], None, None, rows, keys, device=draw.device)
        found: Any = flex.flex_attention(
            *_heads_first(x), SCORES[scored][0] if scored else None, block_mask, scale, sizes.group > 1, return_lse=True
        )
        return {"o": found[0].transpose(1, 2), "lse": found[1]}

    leaves = ("q", "k", "v") if draw.kernel_chance(0.5) else ()
    text = f"mask {masked} score {scored} scale {scale} {made.text}"
    return made.case(library, leaves=leaves, into=("o", "lse"), text=text)


def _infer_rules(draw: Draw, sizes: Heads) -> tuple[dict[str, Any], Rules]:
    scale, factor = _scale(draw, sizes.dim)
    causal, left, cap = draw.kernel_chance(0.5), draw.kernel((-1, -1, 5, 64)), draw.kernel((None, None, 5.0))

    def visible(c: Tensors, b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = (j <= i) if causal else (i - j == i - j)
        return seen & (j >= i - left) if left >= 0 else seen

    change: Change | None = (lambda c, s, b, h, i, j: cap * torch.tanh(s / cap)) if cap else None
    options = {"causal": causal, "window_left": left, "logits_soft_cap": cap, "sm_scale": scale}
    return options, Rules(factor, visible, change)


def _base_2(found: Tensors) -> Tensors:
    """FlashInfer counts in powers of 2, its rows are packed, and its lse lies by rows."""
    o = found["o"] if found["o"].ndim == 3 else found["o"].flatten(0, 1)
    lse = found["lse"] if found["lse"].ndim == 2 else found["lse"].transpose(0, 1).flatten(1)
    return {"o": o, "lse": lse.t() / math.log(2)}


def infer_ragged(draw: Draw) -> Case:
    """FlashInfer's wrapper over packed keys."""
    dtype, sizes = draw.kernel(NO_FLOAT64), places.heads(draw)
    placed = places.packed(draw, sizes, dtype)
    options, rules = _infer_rules(draw, sizes)
    made = _problem(draw, dtype, sizes, placed, rules, {})

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, dtype=torch.uint8, device=draw.device))
        first = arguments["layout"]
        wrapper.plan(
            first.cu_seqlens_q, first.cu_seqlens_k, sizes.q, sizes.kv, sizes.dim, sizes.dim_v,
            q_data_type=dtype, **options,
        )  # fmt: skip
        o, lse = wrapper.run(x["q"], x["k"], x["v"], return_lse=True)
        return {"o": o, "lse": lse}

    return made.case(library, plain=lambda x: _base_2(made.plain(x)), text=f"{options} {made.text}")


def infer_paged(draw: Draw) -> Case:
    """FlashInfer's wrappers over pages: for prompts, and for one query of each request, which see every key."""
    dtype, sizes = draw.kernel(NO_FLOAT64), places.heads(draw, same=True)
    decode = draw.kernel_chance(0.4)
    placed = places.paged(draw, sizes, dtype, shared=decode)
    options, rules = _infer_rules(draw, sizes)
    made = _problem(draw, dtype, sizes, placed, rules, {})
    counts = [len(table) for table in placed.tables]
    last = [(k - 1) % placed.page_size + 1 if k else 0 for _, k in placed.lengths]

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        workspace = torch.empty(1, dtype=torch.uint8, device=draw.device)
        table = (draw.sums(counts), draw.ints([page for own in placed.tables for page in own]), draw.ints(last))
        shape = (sizes.q, sizes.kv, sizes.dim, placed.page_size)
        wrapper: Any
        if decode:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
            given = {name: option for name, option in options.items() if name != "causal"}
            wrapper.plan(*table, *shape, q_data_type=dtype, kv_data_type=dtype, **given)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
            first_q = draw.sums([q for q, _ in placed.lengths])
            wrapper.plan(first_q, *table, *shape, q_data_type=dtype, **options)
        q = x["q"] if x["q"].ndim == 3 else x["q"].flatten(0, 1)
        o, lse = wrapper.run(q, (x["k"], x["v"]), return_lse=True)
        return {"o": o, "lse": lse}

    return made.case(library, plain=lambda x: _base_2(made.plain(x)), text=f"{options} {made.text}")


def sage(draw: Draw) -> Case:
    """sageattn: not farther off than twice what one scale for each head would give."""
    dtype, sizes = draw.kernel(HALVES), places.heads(draw)
    placed = places.dense(draw, sizes, dtype)
    causal, factor = draw.kernel((True, False)), draw.kernel((1.0, 0.5)) * sizes.dim**-0.5
    rules = Rules(factor, (lambda c, b, h, i, j: j <= i) if causal else None, shift=0)
    made = _problem(draw, dtype, sizes, placed, rules, {})

    def library(x: Tensors, arguments: dict[str, Any]) -> Tensors:
        o, lse = sageattention.sageattn(
            x["q"], x["k"], x["v"], "NHD", is_causal=causal, sm_scale=factor, return_lse=True
        )  # fmt: skip
        return {"o": o, "lse": lse}

    return made.case(
        library,
        rough=lambda x: made.by(x, {"q": 127, "k": 127, "v": 16}),
        floor=lambda name, truth: 0.04 * (1 + largest(truth[name])),
        text=f"causal {causal} scale {factor} {made.text}",
    )
