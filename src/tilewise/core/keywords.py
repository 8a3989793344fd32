"""Keyword arguments that a function does not take: names of other libraries are answered with this library's.

A function catches them as `**unknown: NoReturn`, which costs a call nothing and which type checkers refuse, and its
first line is `if unknown: refuse_unknown("attention", unknown)`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from tilewise.core.dispatch import untraced
from tilewise.core.errors import InputError, shown

F = TypeVar("F", bound=Callable[..., Any])


class _Ours(NamedTuple):
    """The parameter that stands for another library's, and what to write."""

    parameter: str
    write: str


_CAUSAL = _Ours("mask", "mask=tilewise.causal")
_SCALE = _Ours("scale", "scale=")
_DROPOUT = _Ours("dropout", "dropout=")
_SINK = _Ours("sink", "sink= takes logits (num_heads_q,); mask=tilewise.sinks(n) keeps the first n keys visible")
_MASK = _Ours(
    "mask", "mask=tilewise.explicit(keep) for a boolean tensor, score=tilewise.bias(values) for one added to the scores"
)
_PADDING = _Ours("mask", "mask=tilewise.lengths(seqlens), or layout=tilewise.Packed(cu_seqlens_q) without padding")
_WINDOW = _Ours(
    "mask",
    "mask=tilewise.window(left + 1, right) for FlashAttention's (left, right): left counts the query's own key here, "
    "and None is no limit",
)
_WINDOW_LEFT = _Ours(
    "mask",
    "mask=tilewise.window(window_left + 1): n counts the query's own key here, and None is no limit, FlashInfer's -1",
)
_SOFTCAP = _Ours("score", "score=tilewise.softcap(cap)")
_ALIBI = _Ours("score", "score=tilewise.alibi(slopes)")
_BIAS = _Ours("score", "score=tilewise.bias(values)")
_SCORE = _Ours("score", "score= takes functions (score, b, h, q_idx, kv_idx); the last query has the last key's q_idx")
_BLOCK_MASK = _Ours(
    "mask",
    "mask= takes functions (b, h, q_idx, kv_idx) -> bool, and tilewise.adapters.flex.flex_attention a BlockMask",
)
_PACKED = _Ours("layout", "layout=tilewise.Packed(cu_seqlens_q, cu_seqlens_k)")
_LONGEST = _Ours("layout", "layout=tilewise.Packed(cu_seqlens_q, max_seqlen_q=...)")
_LONGEST_KEYS = _Ours("layout", "layout=tilewise.Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_k=...)")
_PAGED = _Ours("layout", "layout=tilewise.Paged(block_table, seqlens_k)")
_INDPTR = _Ours(
    "layout",
    "layout=tilewise.Packed(qo_indptr, kv_indptr), or over pages tilewise.Paged(block_table, seqlens_k, qo_indptr)",
)
_PAGES = _Ours(
    "layout", "layout=tilewise.Paged(block_table, seqlens_k): a row of pages for each request, and its number of keys"
)
_AXES = _Ours(
    "q",
    "leave it out: q, k and v are (batch, seqlen, heads, head_dim); transpose (batch, heads, seqlen, head_dim) by "
    ".transpose(1, 2)",
)
_AXES_OF_PAGES = _Ours(
    "k",
    "leave it out: pages are (num_pages, page_size, num_heads_kv, head_dim), with any strides; transpose others by "
    ".transpose(1, 2)",
)
_TUNING = _Ours("impl", "leave it out: the implementation decides, and impl= asks for one by name")
_GROUPED = _Ours("k", "leave it out: num_heads_kv may be any divisor of num_heads_q")
_LSE = _Ours("q", "tilewise.attention_with_lse returns (o, lse)")
_WEIGHTS = _Ours(
    "q",
    "the weights are never stored; for debugging, tilewise.adapters.flash_attn.flash_attn_func(..., "
    "return_attn_probs=True) returns them",
)

ELSEWHERE: dict[str, _Ours] = {
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "key_padding_mask": _PADDING,
    "window_size": _WINDOW,
    "window_left": _WINDOW_LEFT,
    "sliding_window": _Ours("mask", "mask=tilewise.window(n), which counts the query's own key"),
    "block_mask": _BLOCK_MASK,
    "mask_mod": _BLOCK_MASK,
    "score_mod": _SCORE,
    "alibi_slopes": _ALIBI,
    "attn_bias": _BIAS,
    "softcap": _SOFTCAP,
    "logits_soft_cap": _SOFTCAP,
    "sinks": _SINK,
    "s_aux": _SINK,
    "learnable_sink": _SINK,
    "softmax_scale": _SCALE,
    "sm_scale": _SCALE,
    "scaling": _SCALE,
    "dropout_p": _DROPOUT,
    "enable_gqa": _GROUPED,
    "cu_seqlens": _PACKED,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "max_seqlen_q": _LONGEST,
    "max_seqlen_k": _LONGEST_KEYS,
    "qo_indptr": _INDPTR,
    "kv_indptr": _INDPTR,
    "paged_kv_indptr": _PAGES,
    "paged_kv_indices": _PAGES,
    "paged_kv_last_page_len": _PAGES,
    "block_table": _PAGED,
    "page_table": _PAGED,
    "seqused_k": _PAGED,
    "seqlens_k": _PAGED,
    "cache_seqlens": _PAGED,
    "return_lse": _LSE,
    "return_softmax_lse": _LSE,
    "return_attn_probs": _WEIGHTS,
    "need_weights": _WEIGHTS,
    "tensor_layout": _AXES,
    "kv_layout": _AXES_OF_PAGES,
    "num_splits": _TUNING,
    "pack_gqa": _TUNING,
    "kernel_options": _TUNING,
}

_PARAMETERS: dict[str, tuple[str, ...]] = {}


def catches_unknown(function: F) -> F:
    """Note the parameters of a function that ends in `**unknown`, which is no part of the signature that it shows."""
    signature = inspect.signature(function)
    shown = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    _PARAMETERS[function.__name__] = tuple(x.name for x in shown)
    return function


def refuse_unknown(function: str, unknown: Mapping[str, Any], known: tuple[str, ...] = ()) -> NoReturn:
    """Raise InputError for the first of the arguments `unknown`, with what to write in its place."""
    name = next(iter(unknown))
    taken = known or _PARAMETERS[function]
    raise InputError(
        name,
        got=f"{_described(unknown[name])}, an argument that tilewise.{function} does not take",
        expected=f"one of {', '.join(taken)}",
        hint=_hint(name, function, taken),
    )


def _described(value: object) -> str:
    return shown(value) if isinstance(value, (bool, int, float, str, tuple, type(None))) else type(value).__name__


def _hint(name: str, function: str, taken: tuple[str, ...]) -> str:
    ours = ELSEWHERE.get(name)
    if ours is not None:
        return ours.write if ours.parameter in taken else f"tilewise.attention has it: {ours.write}"
    if name in _PARAMETERS["attention"]:
        return f"tilewise.attention has {name}="
    near = _nearest(name, taken)
    return f"did you mean {near}=?" if near else f"help(tilewise.{function}) describes each"


@untraced  # torch.compile traces through the error, and not through difflib
def _nearest(name: str, taken: tuple[str, ...]) -> str | None:
    near = difflib.get_close_matches(name, taken, 1)
    return near[0] if near else None
