"""How many pages there are: what a device's memory has left beside weights and the largest step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.core.errors import InputError, TilewiseError
from tilewise.engine.config import LARGEST_GRAPH, EngineConfig
from tilewise.engine.groups import Group, groups_of
from tilewise.engine.models.decoder import Decoder
from tilewise.kv.pool import PagePool

_ON_CPU = 2**30  # bytes of pages
_ROWS = 256  # of logits that a step makes at most, in the trial


def make_pool(
    decoder: Decoder, groups: Sequence[Group], config: EngineConfig, max_length: int, beside: Decoder | None = None
) -> PagePool:
    """The memory of the pages. A page holds tokens of one group's layers.

    Args:
        decoder: the model.
        groups: of its layers.
        config: how many pages, or the share of memory that they come from.
        max_length: tokens of a sequence at most, for one of which there must be pages.
        beside: another model that gets as many pages from the same memory.

    Raises:
        InputError: the pages hold less than that.
    """
    size = config.page_size
    layers = max(len(group.layers) for group in groups)
    windows = any(group.window is not None for group in groups)

    def pool(pages: int, device: torch.device) -> PagePool:
        return _pool(decoder, layers, config, pages, device)

    step = max(config.max_batch_tokens, config.lag_on(decoder.device) + 2)  # windows pass when tokens are known
    least = sum(group.pages(max_length, step, size) for group in groups)
    pages = config.num_pages
    if pages is None:
        of_page = pool(1, torch.device("cpu")).nbytes
        if beside is not None:
            most = max(len(group.layers) for group in groups_of(beside.config.windows))
            of_page += _pool(beside, most, config, 1, torch.device("cpu")).nbytes
        pages = _budget(decoder, config) // of_page
        pages = max(pages, least) if decoder.device.type == "cpu" else pages
    if pages < least:
        hint = f"give more memory, or set max_model_len to {_fitting(groups, config, pages, max_length)} or less"
        got = f"{pages} pages of {size} tokens"
        expected = f"{least} pages, for max_model_len={max_length} tokens"
        raise InputError("KV cache", got=got, expected=expected, hint=hint)
    try:
        return pool(pages + windows, decoder.device)  # with windows, one more that stays zero
    except RuntimeError as error:
        if isinstance(error, TilewiseError):
            raise
        got, expected = f"{pages} pages of {size} tokens", f"as many as {decoder.device} has memory for"
        raise InputError("KV cache", got=got, expected=expected, hint="set num_pages or max_model_len") from error


def _pool(decoder: Decoder, layers: int, config: EngineConfig, pages: int, device: torch.device) -> PagePool:
    """So many pages of so many layers."""
    model = decoder.config
    return PagePool(
        layers, pages, config.page_size, model.num_heads_kv, model.head_dim,
        dtype=decoder.dtype, device=device, encoding=config.kv_encoding,
    )  # fmt: skip


def _fitting(groups: Sequence[Group], config: EngineConfig, pages: int, max_length: int) -> int:
    """Tokens of the longest sequence that these pages hold."""
    low, high = 0, max_length
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(group.pages(middle, config.max_batch_tokens, config.page_size) for group in groups) <= pages
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _budget(decoder: Decoder, config: EngineConfig) -> int:
    """Bytes for pages: of a GPU's memory the share that was asked for, less what is taken and what a step needs."""
    if decoder.device.type == "cpu":
        return _ON_CPU
    rows = min(config.max_running, config.max_batch_tokens)
    step = _step_bytes(decoder, config.max_batch_tokens, min(rows, _ROWS))
    if config.graphs_on(decoder.device):  # which keep memory of their own
        step += _step_bytes(decoder, config.max_batch_tokens, min(rows, LARGEST_GRAPH))
    free, total = torch.cuda.mem_get_info(decoder.device)
    reserved = torch.cuda.memory_reserved(decoder.device) - torch.cuda.memory_allocated(decoder.device)
    return max(0, int(total * config.memory) - (total - free - reserved) - step)


@torch.no_grad()
def _step_bytes(decoder: Decoder, count: int, rows: int) -> int:
    """The most memory that a step of so many tokens takes while it runs, with some rows of logits, by a trial without
    attention.
    """
    device = decoder.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    tokens = torch.zeros(count, dtype=torch.int64, device=device)
    hidden = decoder.hidden(tokens, lambda layer, qkv, norms: qkv[:, : decoder.config.num_heads].contiguous())
    logits = decoder.logits(hidden[:rows])
    torch.softmax(logits, -1)  # sampling takes about as much again
    return torch.cuda.max_memory_allocated(device) - before
