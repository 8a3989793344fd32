"""Writes in PyTorch: indexed assignment of all tokens, or all pages, at once."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.ops.kv_write.problem import Copy, Write
from tilewise.quant import ByChannel, encode, encode_by_channel
from tilewise.quant.codes import BY_DTYPE
from tilewise.rotary import rotated


def write(call: Write) -> None:
    """Tokens into their slots."""
    page_size = call.k_pages.shape[1]
    slots, k, v, rope = call.slots, call.k, call.v, call.rope
    if int(slots.min()) < 0:
        used = slots >= 0
        slots, k, v = slots[used], k[used], v[used]
        rope = rope and replace(rope, positions=rope.positions[used])
    if rope is not None:
        k = rotated(k, rope)
    if call.scales is None:
        for x, pages in ((k, call.k_pages), (v, call.v_pages)):
            _assign(pages, slots, x.to(pages.dtype))
        return
    at = (slots // page_size, slots % page_size)
    of_keys = [(k, call.k_pages, call.scales[0])] if call.channels is None else []
    if call.channels is not None:
        _by_channel(call.channels, slots, k.to(v.dtype))
    for x, pages, scale in (*of_keys, (v, call.v_pages, call.scales[1])):
        made = encode(x, BY_DTYPE[pages.dtype])
        pages[at], scale[at] = made.data, made.scale


def _assign(pages: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Tokens into their slots, of contiguous pages in half the time."""
    if pages.is_contiguous():
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots.long(), x)
    else:
        pages[slots // pages.shape[1], slots % pages.shape[1]] = x


def _by_channel(channels: ByChannel, slots: torch.Tensor, k: torch.Tensor) -> None:
    """Keys into open pages, after the pages that they fill have been encoded."""
    page_size = channels.data.shape[1]
    page, offset = slots // page_size, slots % page_size
    place = channels.place[page]
    last = ((place < 0) & (offset == page_size - 1)).nonzero()[:, 0]
    if len(last):
        offsets = torch.arange(page_size, device=slots.device)
        tokens = last[:, None] - page_size + 1 + offsets
        new = (tokens >= 0) & (slots[tokens.clamp(min=0)] == slots[last, None] - page_size + 1 + offsets)
        keys = k[tokens.clamp(min=0)]
        if not new.all():
            keys = torch.where(new[..., None, None], keys, channels.open[-1 - place[last]])
        made = encode_by_channel(keys, channels.bits)
        filled = page[last]
        channels.data[filled], channels.scale[filled], channels.least[filled] = made.data, made.scale, made.least
    is_open = place >= 0
    channels.open[place[is_open], offset[is_open]] = k[is_open]


def copy(call: Copy) -> None:
    """Pages onto others."""
    source, target = call.pairs[(call.pairs >= 0).all(1)].unbind(1)
    for pages in (call.k_pages, call.v_pages):
        pages[target] = pages[source]
