"""The specification: one token, or one page, after another."""

from __future__ import annotations

from tilewise.ops.kv_write.problem import Copy, Write
from tilewise.quant import encode
from tilewise.quant.codes import BY_DTYPE


def write(call: Write) -> None:
    """Tokens into their slots."""
    for token, slot in enumerate(call.slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, call.k_pages.shape[1])
            for n, (x, pages) in enumerate(((call.k, call.k_pages), (call.v, call.v_pages))):
                if call.scales is None:
                    pages[page, offset].copy_(x[token])
                else:
                    made = encode(x[token], BY_DTYPE[pages.dtype])
                    pages[page, offset].copy_(made.data)
                    call.scales[n][page, offset].copy_(made.scale)


def copy(call: Copy) -> None:
    """Pages onto others."""
    for source, target in call.pairs.tolist():
        if source >= 0 and target >= 0:
            call.k_pages[target].copy_(call.k_pages[source])
            call.v_pages[target].copy_(call.v_pages[source])
