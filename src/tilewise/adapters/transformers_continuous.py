"""Continuous batching of transformers: attention over its paged cache, which many requests share.

A layer's keys and values are rows of one tensor, one per token, and `read_index` lists the rows of every request in the
order of its tokens. `tilewise.attention` reads these rows in place, as pages of one token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import tilewise as tw
from tilewise.adapters.axes import index, seqlen_first
from tilewise.core.errors import UnsupportedError

_admitted: set[str] = set()


def admit(name: str, forward: Callable[..., Any]) -> None:
    """Let continuous batching run `forward` for `attn_implementation=name` and for "paged|" + name."""
    from transformers.modeling_utils import AttentionInterface

    if "paged|sdpa" in AttentionInterface().valid_keys():  # before 5.19 it put "paged|" in front of any name
        AttentionInterface.register(f"paged|{name}", forward)
        return
    if not _admitted:
        _keep_admitted()
    _admitted.add(name)


def _keep_admitted() -> None:
    """Since 5.19 it takes names from a list only, and changes or refuses others: those admitted stay."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    original = ContinuousBatchingManager.switch_to_cb_friendly_attn

    @functools.wraps(original)
    def switch(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in _admitted:
            original(manager, model, *args, **kwargs)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch


# tracing would copy the cache, which changes in place under several views
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Mapping[str, Any],
    sliding_window: int | None,
    **given: Any,
) -> torch.Tensor:
    """Write a step's keys and values into the cache, and attend to all that its requests may see.

    Args:
        module: the layer; `layer_idx` is its number in the cache.
        query: (1, num_heads_q, rows, head_dim), all requests' new tokens end to end, then rows that only pad.
        key, value: (1, num_heads_kv, rows, head_dim).
        step: transformers' own `cache`, `cu_seq_lens_q` (requests + 1,), `cu_seq_lens_k` likewise (of each kind of
            layer), `read_index` and `write_index` (one tensor for each group of layers), `max_length_q`.
        sliding_window: counts where the cache keeps all tokens of this layer; one that does not has its own.
        given: score, sink, scale and dropout of `tilewise.attention`.

    Returns:
        (rows, num_heads_q, head_dim); 0 in rows that only pad.

    Raises:
        UnsupportedError: another kind of cache, a block table, or sliding windows in a transformers too old for them.
    """
    cache: Any = step["cache"]
    layer = _layer(cache, module)
    if step.get("block_table") is not None:
        raise UnsupportedError(
            "block_table",
            got="a tensor",
            expected="read_index and write_index",
            hint="ContinuousBatchingConfig(max_blocks_per_request=0)",
        )
    reads, writes = (step[name][layer.group] for name in ("read_index", "write_index"))
    cu_q, cu_k = step["cu_seq_lens_q"], step["cu_seq_lens_k"]
    if isinstance(cu_k, Mapping):
        cu_k = cu_k["full_attention" if layer.ring is None else "sliding_attention"]
    cu_q, cu_k = index("cu_seq_lens_q", cu_q), index("cu_seq_lens_k", cu_k)
    update = functools.partial(_update, cache, key, value, module, step)
    mask = _visible(sliding_window if layer.ring is None else layer.ring)
    q = seqlen_first(query)[0]

    if not reads.numel():  # every request is new, so its keys are all in this step
        k, v = update(read=False)
        return tw.attention(q, k, v, mask=mask, layout=tw.Packed(cu_q), **given)

    one_each = step.get("max_length_q", step.get("max_seqlen_q")) == 1
    if layer.rows is not None and (layer.ring is None or one_each):
        update(read=False)
        if layer.ring is not None:  # one new token takes the place of one that no query sees any more
            reads = reads.masked_scatter(reads == layer.sentinel, writes)
        k, v = layer.rows
    else:  # in a ring, several new tokens take the place of some that the first of them still see
        k, v = update(read=True)
        reads = torch.arange(k.shape[0], device=k.device)
    k, v = (x[: v.shape[0], None] for x in (k, v))
    return tw.attention(q, k, v, mask=mask, layout=_one_token_pages(reads, cu_q, cu_k, q.shape[0]), **given)


class _Layer(NamedTuple):
    """Where one layer's keys and values are: its group's number, the tokens that a ring keeps (None: all are kept),
    what stands in `read_index` for a token not yet written to a ring, and the rows themselves (tokens, heads, dim).
    """

    group: int
    ring: int | None
    sentinel: int | None
    rows: tuple[torch.Tensor, torch.Tensor] | None


def _layer(cache: Any, module: Any) -> _Layer:
    if hasattr(cache, "layer_to_allocator"):  # since 5.18
        allocator = cache.layer_to_allocator[module.layer_idx]
        rows = getattr(allocator, "_kv_token_views", {}).get(module.layer_idx)
        ring = getattr(allocator, "sliding_window", None)
        return _Layer(allocator.index, ring, allocator.sentinel_index, rows)
    if hasattr(cache, "layer_index_to_group_indices"):
        group, place = cache.layer_index_to_group_indices[module.layer_idx]
        window = cache.sliding_windows[module.layer_idx]
        ring = None if window == 1 else window
        sentinel = getattr(cache, "sentinel_index", None)
        if ring is not None and sentinel is None:  # 5.4 reads the wrong rows of a ring, whatever attends to them
            raise UnsupportedError(
                "sliding_window",
                got="continuous batching of an older transformers",
                expected="transformers >= 5.17",
                hint="pip install -U transformers",
            )
        rows = (cache.key_cache[place], cache.value_cache[place])
        return _Layer(group, ring, sentinel, rows)
    raise UnsupportedError(
        "cache",
        got=type(cache).__name__,
        expected="the paged cache of transformers' continuous batching",
        hint="generate() without paging works, and so does generate_batch()",
    )


def _update(
    cache: Any, key: torch.Tensor, value: torch.Tensor, module: Any, step: Mapping[str, Any], *, read: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache's own `update`; what it returns as (tokens, heads, dim): all that is read, or else the new tokens."""
    reads = step["read_index"] if read else [index[:0] for index in step["read_index"]]
    if _takes_step(cache.update.__func__):
        k, v = cache.update(key, value, module.layer_idx, {**step, "read_index": reads})
    else:
        k, v = cache.update(key, value, module.layer_idx, reads, step["write_index"])
    if not read:
        k, v = key, value
    k, v = (seqlen_first(x)[0] if x.ndim == 4 else x for x in (k, v))
    return k, v


@functools.cache
def _takes_step(update: Callable[..., Any]) -> bool:
    """Since 5.19 the cache's `update` has the whole step as one argument."""
    return "kwargs" in inspect.signature(update).parameters


@functools.cache
def _visible(window: int | None) -> tw.Mask:
    return tw.causal if window is None else tw.causal & tw.window(window)


def _one_token_pages(reads: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, rows: int) -> tw.Paged:
    """Each token is a page; one more request, without keys, has the rows that only pad, if there are any."""
    cu_q = torch.cat((cu_q, cu_q.new_full((1,), rows)))
    cu_k = torch.cat((cu_k, cu_k[-1:]))
    return tw.Paged((cu_k, index("read_index", reads)), cu_k.diff(), cu_q)
