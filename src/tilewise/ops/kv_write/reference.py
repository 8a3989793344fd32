"""The specification: one token, or one page, after another."""

from __future__ import annotations

import torch

from tilewise.ops.kv_write.problem import Copy, Write
from tilewise.quant import ByChannel, encode, encode_by_channel
from tilewise.quant.codes import BY_DTYPE
from tilewise.rotary import Rope


def write(call: Write) -> None:
    """Tokens into their slots."""
    if call.channels is not None:
        _write_by_channel(call, call.channels)
        return
    for token, slot in enumerate(call.slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, call.k_pages.shape[1])
            k = call.k[token] if call.rope is None else turned(call.k[token], call.rope, token)
            for n, (x, pages) in enumerate(((k, call.k_pages), (call.v[token], call.v_pages))):
                if call.scales is None:
                    pages[page, offset].copy_(x)
                else:
                    made = encode(x, BY_DTYPE[pages.dtype])
                    pages[page, offset].copy_(made.data)
                    call.scales[n][page, offset].copy_(made.scale)


def _write_by_channel(call: Write, channels: ByChannel) -> None:
    slots, page_size = call.slots.tolist(), channels.data.shape[1]
    keys = [
        (k if call.rope is None or slot < 0 else turned(k, call.rope, token)).to(channels.open.dtype)
        for token, (k, slot) in enumerate(zip(call.k, slots, strict=True))
    ]
    for token, slot in enumerate(slots):
        if slot >= 0 and slot % page_size == page_size - 1 and channels.place[slot // page_size] < 0:
            full, page = [], slot // page_size
            for offset in range(page_size):
                at = token - page_size + 1 + offset
                new = at >= 0 and slots[at] == page * page_size + offset
                full.append(keys[at] if new else channels.open[-1 - channels.place[page], offset])
            made = encode_by_channel(torch.stack(full)[None], channels.bits)
            channels.data[page], channels.scale[page], channels.least[page] = made.data[0], made.scale[0], made.least[0]
    assert call.scales is not None
    for token, slot in enumerate(slots):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            if channels.place[page] >= 0:
                channels.open[channels.place[page], offset].copy_(keys[token])
            values = encode(call.v[token], BY_DTYPE[call.v_pages.dtype])
            call.v_pages[page, offset].copy_(values.data)
            call.scales[1][page, offset].copy_(values.scale)


def turned(x: torch.Tensor, rope: Rope, token: int) -> torch.Tensor:
    """The heads of a token, one pair of dimensions after another, float32."""
    cos, sin = (table[rope.positions[token]].float() for table in (rope.cos, rope.sin))
    x = x.float()
    y = x.clone()
    for n in range(rope.rotary_dim // 2):
        first, second = (2 * n, 2 * n + 1) if rope.interleaved else (n, n + rope.rotary_dim // 2)
        y[:, first] = x[:, first] * cos[n] - x[:, second] * sin[n]
        y[:, second] = x[:, second] * cos[n] + x[:, first] * sin[n]
    return y


def copy(call: Copy) -> None:
    """Pages onto others."""
    for source, target in call.pairs.tolist():
        if source >= 0 and target >= 0:
            call.k_pages[target].copy_(call.k_pages[source])
            call.v_pages[target].copy_(call.v_pages[source])
