"""Attention over tiles of keys that a selection takes, and over one key for each of the rest.

A selection becomes a mask that reads a map of tiles (`choice`), so every kernel and its backward run it as any other
mask: what is not taken is not visited. What stands for the rest is a second call, over means of tiles, whose result is
merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tilewise.core.errors import InputError
from tilewise.core.keywords import catches_unknown, refuse_unknown
from tilewise.core.readback import being_traced
from tilewise.formula import expr as e
from tilewise.formula.expr import Expr
from tilewise.formula.formula import Mask, Score, as_mask, as_score, score
from tilewise.formula.walk import transform
from tilewise.layouts import Paged
from tilewise.ops.attention.choice import Selected, choose_tiles, sums_serve
from tilewise.ops.attention.paged_rows import rows_of_call
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.attention.variant import formula_kind
from tilewise.ops.merge import merge
from tilewise.ops.quantize import quantize_qkv
from tilewise.ops.tile_means import tile_means
from tilewise.quant import Quantized
from tilewise.schedule.selection import Prediction, Select, as_select

State = tuple[torch.Tensor, torch.Tensor]
_WIDEST = 512  # head dimension of a call


@catches_unknown
def select_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    select: Select | Prediction | Mask,
    *,
    mask: Any = None,
    score: Any = None,
    layout: Any = None,
    scale: float | None = None,
    impl: str | None = None,
    **unknown: NoReturn,
) -> Selected:
    """The tiles of keys that `attention(q, k, v, select=select, ...)` computes: to look at, or to use in several calls.

    The next steps of a diffusion model, for example, may use the tiles of this one, and then predict nothing. A pair of
    tiles has the score of the means of its queries and keys: their product times scale, through `score` at the tiles'
    middles. Nothing is read on the host.

    Args:
        q, k, mask, score, layout, scale: as `attention` takes them.
        select: a `Select`, or one of its parts.
        impl: of the prediction, "triton", "cpu" or "reference"; None takes the first one that can run it.

    Returns:
        A `Selected`, which `attention(select=...)` takes for calls of the same sizes.

    Raises:
        InputError, FormulaError: an argument is wrong.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Example:
        >>> tiles = tw.select_tiles(q, k, tw.Select(tw.TopK(0.5), block=25), mask=tw.causal)
        >>> o = tw.attention(q, k, v, mask=tw.causal, select=tiles)
    """
    if unknown:
        refuse_unknown("select_tiles", unknown)
    if isinstance(layout, Paged):
        rows = rows_of_call(q, k, k, layout)
        q, k, layout = rows.q, rows.k, rows.layout
    arguments = {"mask": mask, "score": score, "layout": layout, "scale": scale}
    _check(as_select(select), arguments)
    return _made(q, k, k, select, arguments, impl)[1].kept_apart()


def attend(
    run: Callable[[Call, str | None], State], q: torch.Tensor, k: Any, v: Any, select: Any, impl: str | None,
    **arguments: Any,
) -> State:  # fmt: skip
    """(o, lse), where `run` gives those of a call without a selection."""
    whole, selected, arguments = _narrowed(q, k, v, select, arguments)
    near = _near(q, k, v, selected, arguments)
    near.codes = near.codes or whole.codes
    found = run(near, impl)
    if selected.far == "drop" or not whole.has_pairs:
        return found
    rest = _of_the_rest(q, k, v, whole, selected, arguments)
    same = near.scheme is None and rest.q.dtype == q.dtype  # a row in few bits has no exact keys
    o, lse = run(rest, impl if same else None)
    return merge(found, (o.to(found[0].dtype), lse))


def narrowed(q: torch.Tensor, k: Any, v: Any, select: Any, arguments: dict[str, Any]) -> Call:
    """The call over the tiles that a selection takes."""
    _, selected, arguments = _narrowed(q, k, v, select, arguments)
    return _near(q, k, v, selected, arguments)


def _near(q: torch.Tensor, k: Any, v: Any, selected: Selected, arguments: dict[str, Any]) -> Call:
    call = make_call(q, k, v, **arguments)
    if not call.wants_grad:  # a backward would not know what was left out
        call.skip = selected.skip_of(call)
    return call


def _narrowed(
    q: torch.Tensor, k: Any, v: Any, select: Any, arguments: dict[str, Any]
) -> tuple[Call, Selected, dict[str, Any]]:
    """(The call without the selection, the selection made, the arguments of the call with it)"""
    select = select if isinstance(select, Selected) else as_select(select)
    _check(select, arguments)
    mask, score = (arguments.get(name) for name in ("mask", "score"))
    arguments = arguments | {
        "mask": None if mask is None else as_mask(mask),
        "score": None if score is None else as_score(score),
    }
    call, selected = _made(q, k, v, select, arguments)
    near = selected.near(call.num_heads_q)
    return call, selected, arguments | {"mask": near if arguments["mask"] is None else arguments["mask"] & near}


def _made(
    q: torch.Tensor, k: Any, v: Any, select: Any, arguments: dict[str, Any], impl: str | None = None
) -> tuple[Call, Selected]:
    """The call without a selection, and the selection made."""
    formulas: dict[str, Any] = {name: arguments.get(name) for name in ("mask", "score", "layout", "scale")}
    with torch.no_grad():
        call = make_call(q, k, v, **formulas)
        if isinstance(select, Selected):
            return call, select.under(call)
        select = as_select(select)
        call.codes = _with_sums(call, select, arguments.get("quantize"))
        return call, choose_tiles(call, select, impl)


def _with_sums(call: Call, select: Select, quantize: Any) -> Quantized | None:
    """A call's codes, made before or now, if the means that a selection looks at can be made of their sums."""
    if isinstance(quantize, Quantized):
        serves = quantize.q_sums is not None and sums_serve(call, select, quantize.scheme)
        if quantize.turned and (select.far != "drop" or (select.predictions and not serves)):
            raise InputError(
                "select",
                got=f"{select!r}, for codes that were rotated by quantize_qkv(rope=)",
                expected="means of these: far='drop', blocks of multiples of (64, 128), and codes with sums",
                hint="quantize_qkv(..., sums=True), or tilewise.rope first, and a scheme",
            )
        return quantize if serves else None
    if quantize is None or being_traced() or not sums_serve(call, select, quantize):
        return None
    return quantize_qkv(call.q, call.k, call.v, scheme=quantize, sums=True)


def _check(select: Select | Selected, arguments: dict[str, Any]) -> None:
    """Raise InputError unless a selection can be made for these arguments."""
    if select.far != "drop" and arguments.get("dropout"):
        hint = "a summary stands for many keys, of which some would be dropped"
        got = f"{arguments['dropout']}, with far={select.far!r}"
        raise InputError("dropout", got=got, expected="0", hint=hint)
    scored = None if arguments.get("score") is None else as_score(arguments["score"])
    if select.far == "summary2" and scored is not None and formula_kind(None, scored.text) == "curved":
        raise InputError(
            "select far",
            got="'summary2', with a score formula that is not linear in the score",
            expected="a score that only adds to it",
            hint="far='summary' goes with any score",
        )


# what stands for the rest --------------------------------------------------------------------------------------------


def _of_the_rest(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, selected: Selected, arguments: dict[str, Any]
) -> Call:
    """The call over one key for each tile that is not taken."""
    spread, cu_seqlens = selected.far == "summary2", call.cu_seqlens_k
    if spread and 2 * q.shape[-1] > _WIDEST:
        raise InputError(
            "select far",
            got=f"'summary2', with head_dim {q.shape[-1]}",
            expected=f"head_dim of at most {_WIDEST // 2}",
            hint="variances of keys are as many dimensions again; far='summary' takes any",
        )
    if spread and q.dtype == torch.float16:  # which squares may leave
        q, k, v = q.float(), k.float(), v.float()
    of_k = tile_means(k, selected.block[1], cu_seqlens=cu_seqlens, variance=spread)
    (of_v,) = tile_means(v, selected.block[1], cu_seqlens=cu_seqlens)
    keys, values = (x.transpose(-3, -2).to(q.dtype) for x in (of_k[0], of_v))
    if spread:  # the product of squares with variances, times scale, is half the variance of scores
        q = torch.cat([q, q * q], -1)
        keys = torch.cat([keys, (0.5 * call.scale) * of_k[1].transpose(-3, -2).to(q.dtype)], -1)
    arguments = arguments | {
        "mask": selected.rest(call.num_heads_q),
        "score": _score_of_rest(arguments["score"], selected),
        "layout": selected.layout_of_rest(),
        "scale": call.scale,
        "sink": None,
        "quantize": None,
        "seed": None,
    }
    return make_call(q, keys, values, **arguments)


def _score_of_rest(scored: Score | None, selected: Selected) -> Score:
    """The formula at the middle of a tile j, plus the logarithm of how many keys it has."""
    columns, places = selected.block[1], selected.places()

    def summed(s: Expr, b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        start = j * columns
        count = (places.seqlen_k(b) - start).clamp(1, columns)
        moves = {"i": i + (places.seqlen_k(b) - places.tiles_k(b)), "j": start + (count - 1) // 2}

        def moved(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            return moves.get(str(node.value)) if node.op == "sym" else None

        base = s if scored is None else transform(scored.expr, moved)
        return base + e.unary("log", count.float())

    return score(summed, "score of the rest")
