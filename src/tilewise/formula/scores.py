"""Scores by name: ordinary expressions, to combine or to read as examples. `tilewise.formula.library` has the masks."""

from __future__ import annotations

import math

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.core.real import is_finite
from tilewise.formula import expr as e
from tilewise.formula.arguments import check_integer, check_tensor, lead_of, sizes_of, sizes_of_table
from tilewise.formula.expr import Expr
from tilewise.formula.formula import Score, score


def alibi(slopes: torch.Tensor) -> Score:
    """ALiBi: s - slope * |i - j|.

    Args:
        slopes: float tensor (num_heads_q,) or (batch, num_heads_q), which gets gradients.

    Returns:
        A score.

    Raises:
        InputError: slopes is no floating-point tensor of one or two dimensions.

    Source: Press et al., "Train Short, Test Long".

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal, score=tw.alibi(torch.full((4,), 0.5)))
    """
    check_tensor(
        "alibi slopes", slopes, (1, 2), "floating-point", "a slope for each query head: torch.rand(num_heads_q)"
    )
    sizes = sizes_of("alibi slopes", slopes, "batch", "num_heads_q")
    if slopes.ndim == 1:
        return score(lambda s, b, h, i, j: s - slopes[h] * abs(i - j), "alibi(slopes)").sized(*sizes)
    return score(lambda s, b, h, i, j: s - slopes[b, h] * abs(i - j), "alibi(slopes)").sized(*sizes)


def softcap(cap: float) -> Score:
    """cap * tanh(s / cap): scores stay within (-cap, cap).

    Args:
        cap: a finite number above 0.

    Returns:
        A score.

    Raises:
        InputError: another cap.

    Source: Gemma Team, "Gemma 2".

    Example:
        >>> o = tw.attention(q, k, v, score=tw.softcap(30.0))
    """
    symbolic = isinstance(cap, (torch.SymInt, torch.SymFloat))
    if not symbolic and not (is_finite(cap) and cap > 0):
        raise InputError("softcap cap", got=shown(cap), expected="a finite number > 0", hint="leave it out for no cap")
    return score(lambda s, b, h, i, j: float(cap) * e.unary("tanh", s / float(cap)), lambda: f"softcap({cap})")


def relative_bias(table: torch.Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """T5's relative position bias: s + table[bucket(j - i), h].

    Args:
        table: float tensor (num_buckets, num_heads_q), which gets gradients.
        bidirectional: half of the buckets for keys after the query; else those share bucket 0.
        max_distance: in tokens; all distances from there on share the last bucket.

    Returns:
        A score.

    Raises:
        InputError: table is no floating-point tensor of two dimensions, or has too few buckets for max_distance.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning".

    Example:
        >>> o = tw.attention(q, k, v, score=tw.relative_bias(torch.randn(32, 4)))
    """
    check_flags(bidirectional=bidirectional)
    check_tensor("relative_bias table", table, (2,), "floating-point", "a row for each bucket, a column for each head")
    check_integer("relative_bias max_distance", max_distance, "T5 has 128", most=2**31 - 1)
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise InputError(
            "relative_bias",
            got=f"{table.shape[0]} buckets, max_distance {max_distance}",
            expected="at least 4 buckets (2 if not bidirectional), and max_distance beyond the exact ones",
            hint="the first half of a direction's buckets hold one distance each; T5 has 32 and max_distance 128",
        )
    scale = (buckets - exact) / math.log(max_distance / exact)

    def biased(s: Expr, b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        distance = abs(i - j) if bidirectional else (i - j).clamp(min=0)
        # the slack puts distances on a bucket's edge into the bucket that T5's float32 gives, in every precision
        far = e.unary("log", distance.clamp(min=exact).float() * (1.0 / exact)) * scale + 1e-5
        near = distance.clamp(max=exact - 1)  # the clamp lets the bounds of the bucket be proved
        bucket = e.where(e.compare("lt", distance, exact), near, (far.int() + exact).clamp(max=buckets - 1))
        if bidirectional:
            bucket = bucket + e.where(j > i, buckets, 0)
        return s + e.load(table, (bucket, h))

    sizes = sizes_of("relative_bias table", table[0], "num_heads_q")
    return score(biased, lambda: f"relative_bias({tuple(table.shape)})").sized(*sizes)


def bias(values: torch.Tensor) -> Score:
    """s + values[b, h, query, key].

    Args:
        values: float tensor (1 or batch, 1 or num_heads_q, seqlen_q, seqlen_k) or (seqlen_q, seqlen_k), which gets
            gradients.

    Returns:
        A score.

    Raises:
        InputError: values is no floating-point tensor of two or four dimensions.

    Example:
        >>> o = tw.attention(q, k, v, score=tw.bias(torch.randn(100, 100)))
    """
    check_tensor(
        "bias", values, (2, 4), "floating-point", "values[None] adds a batch dimension; explicit() hides pairs"
    )
    table = values if values.ndim == 4 else values[None, None]
    shift = values.shape[-1] - values.shape[-2]
    return score(
        lambda s, b, h, i, j: s + e.load(table, (*lead_of(table, b, h), i - shift, j)),
        lambda: f"bias({tuple(values.shape)})",
    ).sized(*sizes_of_table("bias", table))


def tanh_score() -> Score:
    """tanh(s) in place of s.

    Returns:
        A score.

    Example:
        >>> o = tw.attention(q, k, v, score=tw.tanh_score())
    """
    return score(lambda s, b, h, i, j: e.unary("tanh", s), "tanh_score()")


def sigmoid_score() -> Score:
    """sigmoid(s) in place of s.

    Returns:
        A score.

    Example:
        >>> o = tw.attention(q, k, v, score=tw.sigmoid_score())
    """
    return score(lambda s, b, h, i, j: e.unary("sigmoid", s), "sigmoid_score()")
