"""Hugging Face transformers (5.4 or newer) through tilewise: `register()`, then `attn_implementation="tilewise"`.

transformers describes a mask by a function of indices: causal, sliding, chunked, packed sequences, padding, a model's
own additions. That function is traced into a formula, so no mask of seqlen_q x seqlen_k is built, with or without a
cache. `fuse(model)` replaces the norms, gated units, rotary embeddings and loss.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import tilewise as tw
from tilewise.adapters import transformers_continuous
from tilewise.adapters.axes import autocast, broadcast_load, check_broadcast, check_tensors, raw_index, seqlen_first
from tilewise.adapters.block_mask import BlockMask, mask_of
from tilewise.adapters.sdpa import additive, top_left_causal
from tilewise.adapters.transformers_fused import Fused, fuse, unfuse
from tilewise.core.errors import FormulaError, InputError, UnsupportedError
from tilewise.core.flags import check_flags
from tilewise.core.optional import importing
from tilewise.core.readback import host_values, values_checked
from tilewise.layout_checks import check_ends

__all__ = ["Fused", "attention_forward", "attention_mask", "fuse", "register", "unfuse"]


def register(name: str = "tilewise") -> None:
    """Register tilewise with transformers as `attn_implementation=name`, also for continuous batching.

    Call it once per process, before a model is loaded with that name or `model.set_attn_implementation(name)`.

    Args:
        name: the name that models are given.

    Raises:
        MissingExtraError: transformers is not installed, or older than 5.4.

    Example:
        >>> from tilewise.adapters import transformers as adapter
        >>> adapter.register()  # then AutoModel.from_pretrained(path, attn_implementation="tilewise")
    """
    with importing("transformers>=5.4", "hf", name="register"):
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface

        if "q_offset" not in inspect.signature(sdpa_mask).parameters:
            raise ImportError("an older version of transformers")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    transformers_continuous.admit(name, attention_forward)


class _Mask(BlockMask):
    """A mask function over absolute positions, and where queries and keys start among them.

    transformers passes it on untouched: it takes a BlockMask for a mask that is already prepared.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        offsets: tuple[int | torch.Tensor, int],
        shape: tuple[int, int, int, int],
        device: torch.device | str,
    ) -> None:
        q_offset, kv_offset = offsets
        self._function, self._offsets = function, offsets
        super().__init__(lambda b, h, q, k: function(b, h, q + q_offset, k + kv_offset), shape=shape, device=device)

    ndim = 4  # of (batch, heads, seqlen_q, seqlen_k), as the tensor in whose place it stands

    def __getitem__(self, index: Any) -> Any:
        """Some of the queries: models slice a prepared mask as they slice their hidden states."""
        everything = slice(None)
        if not (isinstance(index, tuple) and len(index) > 2 and isinstance(index[2], slice)):
            return super().__getitem__(index)
        if any(part != everything for part in (*index[:2], *index[3:])) or index[2].step not in (None, 1):
            return super().__getitem__(index)
        start, stop, _ = index[2].indices(self.seq_lengths[0])
        offsets = (self._offsets[0] + start, self._offsets[1])
        shape = (*self._lead, max(stop - start, 0), self.seq_lengths[1])
        return _Mask(self._function, offsets, shape, self.device)

    def __radd__(self, scores: Any) -> Any:
        raise UnsupportedError(
            "attn_implementation",
            got="a model that adds masks to its scores itself",
            expected="one that uses transformers' attention interface",
            hint="load it with attn_implementation='eager'",
        )

    def mask_for(self, seqlen_q: int, seqlen_k: int) -> tw.Mask | None:
        shift, (q_offset, kv_offset) = seqlen_k - seqlen_q, self._offsets
        if shift not in self._masks:
            # with a growing cache both are the number of keys seen: the query's place on the key axis needs no offset
            later = 0 if isinstance(q_offset, int) and q_offset == shift else q_offset - shift
            mask = tw.mask(
                lambda b, h, i, j: self._function(b, h, _plus(i, later), _plus(j, kv_offset)), "transformers mask"
            )
            self._masks[shift] = self._sized(mask)
        return self._masks[shift]


def _plus(position: Any, offset: int | torch.Tensor) -> Any:
    return position if isinstance(offset, int) and offset == 0 else position + offset


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """transformers' AttentionMaskInterface: called in each forward pass, once for each kind of mask of the model.

    Args:
        batch_size, q_length, kv_length: sizes of the attention to come.
        q_offset, kv_offset: absolute positions of the first query and of the first key.
        mask_function: (b, h, q_idx, kv_idx) -> bool over absolute positions; causal when None.
        attention_mask: bool (batch, seen tokens), False for padding on either side; None for no padding.
        device: where attention will run.
        kwargs: what else transformers passes, for the mask that it makes if `mask_function` cannot be traced.

    Returns:
        A BlockMask of `tilewise.adapters.flex`. If `mask_function` cannot be traced: with a warning, the bool tensor
        (batch, 1, q_length, kv_length) that transformers makes for PyTorch's attention.

    Example:
        >>> from tilewise.adapters import transformers as adapter
        >>> adapter.attention_mask(2, 100, 100).sparsity() > 0  # causal
        False
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    function = causal_mask_function if mask_function is None else mask_function
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if not torch.compiler.is_compiling() and padding is not None and bool(padding[:, kv_offset:][:, :kv_length].all()):
        padding = None  # read once a forward pass, as transformers does for PyTorch's attention
    shape = (batch_size, 1, q_length, kv_length)
    if padding is None and function is bidirectional_mask_function:
        return BlockMask(None, shape=shape, device=device)
    visible = function if padding is None else functools.partial(_unpadded, function, padding)
    try:
        return _Mask(visible, (q_offset, kv_offset), shape, device)
    except FormulaError as error:
        warnings.warn(f"a mask of this model is built in full, {q_length} x {kv_length}: {error}", stacklevel=2)
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=device,
            **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )


def _unpadded(function: Callable[..., Any], padding: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> Any:
    return function(b, h, q, k) & padding[b, k]


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' AttentionInterface: called in each attention layer.

    Args:
        module: the layer; its `is_causal` is used if neither a mask nor `is_causal` is given.
        query: (batch, num_heads_q, seqlen_q, head_dim).
        key, value: (batch, num_heads_kv, seqlen_k, head_dim and head_dim_v), not repeated for grouped heads.
        attention_mask: what `attention_mask` made; or a 4-D bool or float tensor; or 2-D padding; or None. With fewer
            queries than keys, as with a cache, padding or a window align the last query to the last key, as
            FlashAttention-2 does; otherwise the first query is aligned to the first key, as in PyTorch's attention.
        dropout, scaling: probability; factor of the scores, default head_dim ** -0.5.
        is_causal: whether keys after the query are hidden, if `attention_mask` is None or 2-D; None asks `module`.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: (num_heads_q,) attention sinks.
        sliding_window: used if `attention_mask` is None or 2-D; other masks contain it.
        kwargs: `position_bias` (1 or batch, num_heads_q, seqlen_q, seqlen_k) is added to the scores; `cu_seq_lens_q`
            and `cu_seq_lens_k` separate packed sequences; `cache`, with what else continuous batching passes (see
            `transformers_continuous.attend`), is written and read, and decides about causality and windows.

    Returns:
        (batch, seqlen_q, num_heads_q, head_dim_v), and None for the weights, which are never built.

    Raises:
        InputError: a tensor does not fit.
        UnsupportedError: a model that selects keys or sinks for each query; or a mask or a position bias together with
            a paged cache.

    Example:
        >>> from tilewise.adapters import transformers as adapter
        >>> heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        >>> o, _ = adapter.attention_forward(torch.nn.Identity(), *heads_first, is_causal=True)
    """
    if is_causal is not None:
        check_flags(is_causal=is_causal)
    for name in ("indices", "block_indices", "sinks"):  # what ignoring would change the result
        if kwargs.get(name) is not None:
            raise UnsupportedError(name, got="a tensor", expected="None", hint="use attn_implementation='eager'")
    hint = "x[None] adds a batch dimension"
    check_tensors("(batch, heads, seqlen, dim)", (4,), hint, query=query, key=key, value=value)
    sizes = (query.shape[-2], key.shape[-2])
    full = (query.shape[0], query.shape[1], *sizes)
    shift = sizes[1] - sizes[0]
    score = None if not softcap else tw.softcap(softcap)
    if kwargs.get("cache") is not None:
        for name, given in (("attention_mask", attention_mask), ("position_bias", kwargs.get("position_bias"))):
            if isinstance(given, torch.Tensor):  # its places are not those of the keys in a cache
                raise UnsupportedError(name, got="a tensor", expected="None", hint="generate() without paging works")
        options = {"score": score, "sink": s_aux, "scale": scaling, "dropout": dropout}
        o = transformers_continuous.attend(module, query, key, value, kwargs, sliding_window, **options)
        return o[None], None
    if isinstance(attention_mask, TorchBlockMask):
        mask = mask_of(attention_mask, *sizes)
    elif attention_mask is None or _rank(attention_mask) == 2:
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        if attention_mask is None and sliding_window is None:
            # as transformers' own path to PyTorch's attention has it
            mask = top_left_causal(shift) if causal and sizes[0] > 1 else None
        else:
            mask = _pattern(causal, sliding_window)
        if attention_mask is not None:
            mask = _both(mask, _padding(attention_mask, query.shape[0], sizes[1]))
    else:
        table = attention_mask[..., : sizes[1]]
        check_broadcast("attention_mask", table, full)
        if table.dtype == torch.bool:
            mask = tw.mask(lambda b, h, i, j: broadcast_load(table, b, h, raw_index(i, shift), j), "attention_mask")
        else:
            # the most negative number of a dtype is how transformers writes "hidden"
            mask, biased = additive(table, shift, hidden_to=torch.finfo(table.dtype).min / 2)
            score = biased if score is None else score >> biased
    if kwargs.get("cu_seq_lens_q") is not None:
        mask = _both(mask, _sequences(kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"), query.shape[0], sizes))
    bias = kwargs.get("position_bias")
    if bias is not None:
        hint = "x[None] adds a dimension that is shared"
        check_tensors("(1 or batch, heads, seqlen_q, seqlen_k)", (4,), hint, position_bias=bias)
        check_broadcast("position_bias", bias, full)
        added = tw.score(lambda s, b, h, i, j: s + broadcast_load(bias, b, h, raw_index(i, shift), j), "position_bias")
        score = added if score is None else score >> added

    q, k, v = (seqlen_first(x) for x in autocast(query, key, value))
    o = tw.attention(q, k, v, mask=mask, score=score, sink=s_aux, scale=scaling, dropout=dropout)
    return o.contiguous(), None


def _rank(attention_mask: Any) -> int:
    """2 for padding, 4 for a mask over pairs; raise InputError for anything else."""
    expected, hint = "(batch, seqlen_k) or (batch, 1 or heads, seqlen_q, seqlen_k)", "mask[:, None] adds one for heads"
    check_tensors(expected, (2, 4), hint, attention_mask=attention_mask)
    dtype = attention_mask.dtype
    if attention_mask.ndim == 4 and dtype != torch.bool and not dtype.is_floating_point:
        hint = ".bool() for True where a pair may meet, .float() to add it to the scores"
        raise InputError("attention_mask", got=str(dtype), expected="bool or floating point", hint=hint)
    return int(attention_mask.ndim)


def _both(first: tw.Mask | None, second: tw.Mask | None) -> tw.Mask | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _pattern(causal: bool, sliding_window: int | None) -> tw.Mask | None:
    """Of windows and padding that are no prepared mask, as FlashAttention-2 takes them: the last query stands at the
    last key.
    """
    mask = tw.causal if causal else None
    if sliding_window is None:
        return mask
    return _both(mask, tw.mask(lambda b, h, i, j: abs(i - j) < sliding_window, "sliding_window"))


def _padding(keep: torch.Tensor, batch: int, seqlen_k: int) -> tw.Mask:
    keep = keep[:, max(0, keep.shape[1] - seqlen_k) :].bool()
    if keep.shape[0] != batch or keep.shape[1] != seqlen_k:
        expected = f"({batch}, {seqlen_k}) or more columns, of which the last count"
        raise InputError(
            "attention_mask", got=f"shape {tuple(keep.shape)}", expected=expected, hint="False for padding"
        )
    return tw.mask(lambda b, h, i, j: keep[b, j], "padding")


def _sequences(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, batch: int, sizes: tuple[int, int]
) -> tw.Mask:
    """Queries see keys of their own sequence, of those laid end to end in a batch of one."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    hint = "tilewise.attention(layout=tilewise.Packed(...)) takes lengths that differ between queries and keys"
    check_tensors("(sequences + 1,)", (1,), hint, cu_seq_lens_q=cu_seqlens_q, cu_seq_lens_k=cu_seqlens_k)
    given = {"cu_seq_lens_q": cu_seqlens_q, "cu_seq_lens_k": cu_seqlens_k}
    for name, x in given.items():
        if x.dtype not in (torch.int32, torch.int64) or not x.shape[0]:
            got, expected = f"{x.dtype} {tuple(x.shape)}", "int32 or int64 (sequences + 1,)"
            raise InputError(name, got=got, expected=expected, hint="running sums of the lengths, from 0")
    expected = "packed sequences in a batch of 1, with as many queries as keys"
    if batch != 1 or sizes[0] != sizes[1] or cu_seqlens_q.shape != cu_seqlens_k.shape:
        got = f"batch {batch}, seqlen_q {sizes[0]}, seqlen_k {sizes[1]}"
        raise InputError("cu_seq_lens_q", got=got, expected=expected, hint=hint)
    if values_checked(cu_seqlens_q.device):
        for (name, x), tokens in zip(given.items(), sizes, strict=True):
            check_ends(name, x, tokens)
        if cu_seqlens_k is not cu_seqlens_q and host_values(cu_seqlens_k) != host_values(cu_seqlens_q):
            raise InputError("cu_seq_lens_k", got="other lengths than cu_seq_lens_q", expected=expected, hint=hint)
    places = torch.arange(sizes[0], device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    return tw.document(torch.searchsorted(cu_seqlens_q[1:].contiguous(), places, right=True))
