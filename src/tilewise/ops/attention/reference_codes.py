"""The specification of attention over codes: what `Quantized` stands for, multiplied exactly, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewise.ops.attention.codes import backward as backward
from tilewise.ops.attention.codes import encoded
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.attention.reference import attention_reference
from tilewise.quant.blocks import Quantized


def attention_of_codes(
    x: Quantized, *, mask: Any = None, score: Any = None, sink: Any = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) in float64 of the codes in `x`, with nothing rounded in between: weights are no codes.

    What centring took out is there again, exactly: o has the mean of values, a score all three of its terms, and lse,
    in natural logarithms, is that of these scores. Rows that see no key give 0 and -inf, centred values or not.

    Args:
        x: what `tilewise.quantize_qkv` gave.
        mask, score, sink: as `tilewise.attention` has them.
        scale: of scores; None is 1 / sqrt(head_dim).

    Returns:
        o (batch, seqlen_q, num_heads_q, head_dim_v) and lse (batch, num_heads_q, seqlen_q), packed (total_q, ...) and
        (num_heads_q, total_q).

    Raises:
        InputError, FormulaError: as `tilewise.attention`.
    """
    q, k, v = x.numbers()
    dim = x.q.shape[-1]
    # the call is checked as one of the head_dim that users know; what centring took out are more columns
    call = make_call(q[..., :dim], k[..., :dim], v, mask=mask, score=score, sink=sink, layout=x.layout, scale=scale)
    return attention_reference(replace(call, q=q, k=k))


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference as an implementation: rounded to the dtypes of a call."""
    q, k, v = encoded(call, "reference").numbers()
    with torch.no_grad():
        o, lse = attention_reference(replace(call, q=q, k=k, v=v))
    return o.to(call.q.dtype), lse.to(call.new_lse().dtype)
