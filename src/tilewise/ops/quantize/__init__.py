"""Queries, keys and values of attention as codes of 8 or 4 bits, in blocks, by a scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch

from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.core.keywords import catches_unknown, refuse_unknown
from tilewise.core.readback import being_traced, values_checked
from tilewise.layouts import Dense, Packed, Paged, copied
from tilewise.ops.attention.paged_rows import rows_of_call
from tilewise.ops.quantize.problem import (
    NUMBERS,
    Call,
    check,
    check_ropes,
    has_sums,
    make_call,
    names,
    of_values,
)
from tilewise.ops.quantize.table import QUANTIZE
from tilewise.ops.rope import rope as turn
from tilewise.quant.blocks import Quantized
from tilewise.quant.schemes import Scheme
from tilewise.rotary import Rope


@catches_unknown
def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scheme: Scheme,
    layout: Dense | Packed | Paged | None = None,
    rope: Rope | tuple[Rope | None, Rope | None] | None = None,
    sums: bool = False,
    impl: str | None = None,
    **unknown: NoReturn,
) -> Quantized:
    """Quantize q, k and v by a scheme, for `attention(quantize=...)`: once for several calls, or with rotary embedding.

    Centring takes off the mean: of a block of 64 queries, rounded to their dtype; of the keys or values of a sequence,
    in float32. Sums of means are float64. Rotation comes next. A group's scale is its largest absolute value over the
    largest code (127, 7 or 448; 4.5 for values with pv_sum="fp16"), in float32; codes are rounded to the nearest, ties
    to even. Rows after a sequence's last one count as zeros.

    Codes, scales and means have the same bits in every implementation, unless float64 sums of means round differently.
    With `rotate=`, rotated numbers and biases differ by float32 roundings, and codes by at most one.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), packed (total_q, num_heads_q, head_dim); float16, bfloat16 or
            float32, head_dim 1 to 256, unit stride in it.
        k: (batch, seqlen_k, num_heads_kv, head_dim), num_heads_kv a divisor of num_heads_q; dtype and device of q.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), likewise. Any of the three may be empty.
        scheme: a `tilewise.Sage` or `tilewise.FP8`.
        layout: `tilewise.Packed(cu_seqlens_q, cu_seqlens_k)` for packed sequences; None is dense. Requests over pages
            (`tilewise.Paged`) are copied into packed sequences first, and codes are of these.
        rope: rotates queries and keys by their positions before all else, in the kernels that quantize: a
            `tilewise.Rope` for both, or a pair, of which either may be None. The bits are those of `tilewise.rope`.
        sums: whether to return sums of blocks of queries and keys as well, from which tiles are predicted; not with a
            scheme that rotates, or has one scale for a head.
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        A `tilewise.quant.Quantized`. A group of zeros has the scale 0, and so has one whose scale would be below the
        smallest normal float32. A group that holds NaN or an infinity has the scale NaN and codes 0, as have groups
        that share a mean with it. Values that are not quantized (pv="fp16", "bf16") are rounded, in float16 to an
        infinity beyond 65,504; v itself where nothing changes it. No gradients.

    Raises:
        InputError: an argument is wrong, or requires a gradient.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: Zhang et al., "SageAttention2", 2024; Shah et al., "FlashAttention-3", 2024.

    Example:
        >>> codes = tw.quantize_qkv(q, k, v, scheme=tw.Sage2())
        >>> o = tw.attention(q, k, v, mask=tw.causal, quantize=codes)
    """
    if unknown:
        refuse_unknown("quantize_qkv", unknown)
    check_flags(sums=sums)
    if isinstance(layout, Paged):
        rows = rows_of_call(q, k, v, layout)
        q, k, v, layout = rows.q, rows.k, rows.v, rows.layout
    codes = codes_of(q, k, v, scheme, layout, rope, sums, impl)
    if isinstance(codes.layout, Packed) and values_checked(codes.q.device):
        codes = replace(codes, layout=copied(codes.layout))  # a caller may change its lengths in place
    return codes


def codes_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scheme: Scheme,
    layout: Dense | Packed | None,
    rope: Any = None,
    sums: bool = False,
    impl: str | None = None,
) -> Quantized:
    """As `quantize_qkv`, for use in the same call: the layout's tensors are the caller's."""
    scheme, layout = check(q, k, v, scheme, layout)
    ropes = check_ropes(rope, q, k)
    turned = bool(ropes)
    if "k" in ropes and "q" in scheme.smooth:  # means of queries meet keys as they are
        k = turn(k, rope=ropes.pop("k"))
    if sums and not has_sums(scheme):
        raise InputError(
            "sums",
            got="True",
            expected=f"False for {scheme.text}",
            hint="a scheme without rotation, with scales of a block or finer",
        )
    keys, values = make_call("k", k, scheme, layout, None, sums, ropes.get("k")), make_call("v", v, scheme, layout)
    along = keys.summed and not _as_they_are(values)
    if along:
        keys.take_along(values)
    of_k = _encoded(keys, impl)
    of_v = of_values(of_k) if along else _encoded(values, impl, _nothing_left(keys))
    queries = make_call("q", q, scheme, layout, of_k.get("mean"), sums, ropes.get("q"))
    of_q = _encoded(queries, impl, _nothing_left(keys if along else values))
    return Quantized(
        scheme,
        layout,
        of_q["codes"],
        of_k["codes"],
        of_v["codes"],
        of_q["scale"],
        of_k["scale"],
        of_v.get("scale"),
        of_q.get("mean"),
        of_k.get("mean"),
        of_v.get("mean"),
        of_q.get("bias"),
        k.detach() if "q" in scheme.smooth else None,
        (of_q["sum"], of_q["unit_sum"]) if sums else None,
        (of_k["sum"], of_k["unit_sum"]) if sums else None,
        turned,
    )


def _encoded(call: Call, impl: str | None, behind: bool = False) -> dict[str, torch.Tensor]:
    """The results by name; `behind` as in the call."""
    if _as_they_are(call):
        return {"codes": call.x.detach().to(NUMBERS[call.kind]).contiguous()}
    call.behind = behind
    return dict(zip(names(call), QUANTIZE(call, impl), strict=True))


def _as_they_are(call: Call) -> bool:
    """Whether values stay numbers that nothing is taken off."""
    return call.kind in NUMBERS and not call.smooth


def _nothing_left(call: Call) -> bool:
    """Whether the call's last kernel is known, and reads nothing that was forgotten since."""
    no_kernel = _as_they_are(call) or not call.x.numel() or being_traced()  # a compiler may order them otherwise
    return not (no_kernel or call.leaves_memory)
