"""Writes in PyTorch: indexed assignment of all tokens, or all pages, at once."""

from __future__ import annotations

from dataclasses import replace

from tilewise.ops.kv_write.problem import Copy, Write
from tilewise.quant import encode
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
    at = (slots // page_size, slots % page_size)
    if call.scales is None:
        call.k_pages[at] = k.to(v.dtype)
        call.v_pages[at] = v
        return
    for x, pages, scale in zip((k, v), (call.k_pages, call.v_pages), call.scales, strict=True):
        made = encode(x, BY_DTYPE[pages.dtype])
        pages[at], scale[at] = made.data, made.scale


def copy(call: Copy) -> None:
    """Pages onto others."""
    source, target = call.pairs[(call.pairs >= 0).all(1)].unbind(1)
    for pages in (call.k_pages, call.v_pages):
        pages[target] = pages[source]
