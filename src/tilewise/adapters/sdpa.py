"""PyTorch's `scaled_dot_product_attention`, run by tilewise: called directly, or installed in place of PyTorch's.

Conventions are PyTorch's: (..., heads, seqlen, dim), `is_causal` aligned to the top left (query 0 sees key 0), a
boolean mask is True where a query sees a key, a float mask is added to the scaled scores and hides a key where it is
-inf or the most negative number of float32 or bfloat16. A row that sees no key gives 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

import tilewise as tw
from tilewise.adapters.axes import autocast, broadcast_load, check_tensors, raw_index, raw_mask, seqlen_first
from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags

__all__ = ["install", "installed", "scaled_dot_product_attention", "uninstall"]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` through `tilewise.attention`.

    Args:
        query: (..., num_heads_q, seqlen_q, head_dim); 2-D and 3-D tensors have no heads or no batch.
        key, value: (..., num_heads_kv, seqlen_k, head_dim and head_dim_v); leading dimensions broadcast.
        attn_mask: bool or float, broadcastable to (..., num_heads_q, seqlen_q, seqlen_k); a float one takes a gradient.
            Or one of `torch.nn.attention.bias`: `causal_upper_left`, `causal_lower_right`.
        dropout_p: probability in [0, 1] with which a weight is dropped, also in eval mode, as PyTorch's.
        is_causal: query q sees keys 0 to q.
        scale: factor of query key^T; default head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads.

    Returns:
        (..., num_heads_q, seqlen_q, head_dim_v).

    Raises:
        InputError: what PyTorch refuses too (heads that differ without `enable_gqa`, `attn_mask` with `is_causal`);
            and a mask of a wrong shape if there are no queries or no keys, which PyTorch does not check.

    Example:
        >>> from tilewise.adapters.sdpa import scaled_dot_product_attention
        >>> query, key, value = torch.randn(3, 2, 4, 100, 16)
        >>> out = scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    hint = "add the missing dimension with x[None]"
    check_tensors("(..., seqlen, dim)", range(2, 65), hint, query=query, key=key, value=value)
    if attn_mask is not None and is_causal:
        hint = "a mask that is causal needs no is_causal"
        raise InputError("attn_mask", got="a mask with is_causal=True", expected="one of them", hint=hint)
    lead = _lead(query, key, value, enable_gqa)
    q, k, v = (_four_dimensional(x, lead, keep_heads=enable_gqa) for x in (query, key, value))
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    shift = seqlen_k - seqlen_q

    mask: tw.Mask | None = None
    score: tw.Score | None = None
    if isinstance(attn_mask, CausalBias):
        sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
        if sizes != (seqlen_q, seqlen_k):
            expected = f"{(seqlen_q, seqlen_k)}, seqlen_q and seqlen_k"
            raise InputError("attn_mask", got=f"a causal bias of {sizes}", expected=expected, hint="make it anew")
        is_causal = attn_mask.variant == CausalVariant.UPPER_LEFT
    if is_causal or isinstance(attn_mask, CausalBias):
        mask = top_left_causal(shift) if is_causal else tw.causal
    elif attn_mask is not None:
        mask, score = formula_of(attn_mask, lead, seqlen_q, seqlen_k)
    if isinstance(dropout_p, torch.Tensor) and dropout_p.numel() == 1:
        dropout_p = float(dropout_p)
    if isinstance(dropout_p, (int, float, numbers.Real)) and dropout_p == 1:  # every weight is dropped
        mask, dropout_p = _NOTHING, 0.0
    q, k, v = (seqlen_first(x) for x in autocast(q, k, v))
    o = tw.attention(q, k, v, mask=mask, score=score, scale=scale, dropout=dropout_p)
    return o.transpose(1, 2).reshape(*lead, seqlen_q, v.shape[-1])


def additive(table: torch.Tensor, shift: int, hidden_to: float | None = None) -> tuple[tw.Mask, tw.Score]:
    """The formula of a float mask of rank 4: its value is added, and a pair is hidden where it is `hidden_to` or less.

    Args:
        table: (1 or batch, 1 or heads, 1 or seqlen_q, 1 or seqlen_k), differentiable.
        shift: seqlen_k - seqlen_q.
        hidden_to: tiles of such values only are not visited. None: from where on numbers leave float32 in base 2, as
            the least of float32 and bfloat16 do.
    """
    hidden = table.detach()

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        value = broadcast_load(hidden, b, h, raw_index(i, shift), j)
        # not ~, which Dynamo cannot trace here; and of a number that is no literal it may make a symbol
        return torch.logical_not(value <= (-2.3e38 if hidden_to is None else hidden_to))

    mask = tw.mask(visible, "visible(attn_mask)")
    score = tw.score(lambda s, b, h, i, j: s + broadcast_load(table, b, h, raw_index(i, shift), j), "attn_mask")
    return mask, score


def formula_of(
    attn_mask: torch.Tensor, lead: tuple[int, ...], seqlen_q: int, seqlen_k: int
) -> tuple[tw.Mask, tw.Score | None]:
    """The formula of PyTorch's `attn_mask`, bool or float, broadcastable to (*lead, seqlen_q, seqlen_k), where `lead`
    is (..., heads). Raises InputError for another shape or dtype.
    """
    table, shift = _table(attn_mask, lead, seqlen_q, seqlen_k), seqlen_k - seqlen_q
    if attn_mask.dtype != torch.bool:
        return additive(table, shift)
    return tw.mask(lambda b, h, i, j: broadcast_load(table, b, h, raw_index(i, shift), j), "attn_mask"), None


def top_left_causal(shift: int) -> tw.Mask:
    """PyTorch's causal mask, over a query's own index; `shift` is seqlen_k - seqlen_q."""
    return raw_mask(top_left, shift) if shift else tw.causal


def top_left(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def _nothing(b: Any, h: Any, i: Any, j: Any) -> bool:
    return False


_NOTHING = tw.mask(_nothing, "nothing")


def _lead(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The leading dimensions of the result: batch dimensions and query heads."""
    shapes = [x.shape[:-2] for x in (query, key, value)]
    if enable_gqa:
        if not shapes[0] or not shapes[1] or not shapes[1][-1] or shapes[0][-1] % shapes[1][-1]:
            raise InputError(
                "key",
                got=f"shape {tuple(key.shape)}",
                expected="heads that divide those of query",
                hint="each key/value head serves as many query heads; enable_gqa=False broadcasts",
            )
        shapes = [shape[:-1] for shape in shapes]
    try:
        lead = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise InputError(
            "key",
            got=f"shapes {tuple(key.shape)}, {tuple(value.shape)}",
            expected=f"leading dimensions that broadcast with query {tuple(query.shape)}",
            hint="pass enable_gqa=True for fewer key/value heads than query heads",
        ) from None
    return (*lead, query.shape[-3]) if enable_gqa else lead


def _four_dimensional(x: torch.Tensor, lead: tuple[int, ...], *, keep_heads: bool) -> torch.Tensor:
    """(..., heads, seqlen, dim) with `lead` as leading dimensions, flattened to (batch, heads, seqlen, dim)."""
    wanted = (*lead[:-1], x.shape[-3]) if keep_heads else lead
    x = x.expand(*wanted, *x.shape[-2:]) if x.shape[:-2] != wanted else x
    heads = wanted[-1] if wanted else 1
    return x if x.ndim == 4 else x.reshape(math.prod(wanted[:-1]), heads, *x.shape[-2:])


def _table(attn_mask: torch.Tensor, lead: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """The mask with rank 4; dimensions of extent 1 stay so, except where several batch dimensions become one."""
    full = (*lead, seqlen_q, seqlen_k)
    hint = "a mask over some of the dimensions has 1 for the others: keep[:, None, None, :]"
    check_tensors(f"broadcastable to {full}", range(65), hint, attn_mask=attn_mask)
    shape = (1,) * (len(full) - attn_mask.ndim) + tuple(attn_mask.shape)
    # not `in (1, size)`: under torch.compile a symbolic size is never found in a tuple
    if len(shape) != len(full) or any(n != 1 and n != size for n, size in zip(shape, full, strict=True)):
        got = f"shape {tuple(attn_mask.shape)}"
        raise InputError("attn_mask", got=got, expected=f"broadcastable to {full}", hint=hint)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        hint = ".bool() for True where a pair may meet, .float() to add it to the scores"
        raise InputError("attn_mask", got=str(attn_mask.dtype), expected="bool or floating point", hint=hint)
    table = attn_mask.reshape((1,) * (4 - len(shape)) + shape)
    if table.ndim > 4:
        batches = table.shape[:-3]
        if any(n > 1 for n in batches):
            table = table.expand(*lead[:-1], *table.shape[-3:])
        table = table.reshape(math.prod(table.shape[:-3]), *table.shape[-3:])
    return table


_torch_function = torch.nn.functional.scaled_dot_product_attention


def install() -> None:
    """Replace `torch.nn.functional.scaled_dot_product_attention` by tilewise's function, for all callers.

    Code that imported the function by name before keeps PyTorch's. A second call changes nothing.

    Example:
        >>> from tilewise.adapters import sdpa
        >>> sdpa.install()
        >>> out = torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 2, 4, 100, 16))  # by tilewise
        >>> sdpa.uninstall()
    """
    global _torch_function
    if torch.nn.functional.scaled_dot_product_attention is not scaled_dot_product_attention:
        _torch_function = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


def uninstall() -> None:
    """Put back the function that `install` replaced; does nothing if tilewise's function is not installed.

    Example:
        >>> from tilewise.adapters import sdpa
        >>> sdpa.uninstall()
    """
    if torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention:
        torch.nn.functional.scaled_dot_product_attention = _torch_function


@contextmanager
def installed() -> Iterator[None]:
    """`install` for a `with` block, which puts back the previous function at its end, also after an exception.

    Returns:
        A context manager; blocks may be nested.

    Example:
        >>> from tilewise.adapters import sdpa
        >>> with sdpa.installed():
        ...     out = torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 2, 4, 100, 16))
    """
    before = torch.nn.functional.scaled_dot_product_attention
    install()
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = before
