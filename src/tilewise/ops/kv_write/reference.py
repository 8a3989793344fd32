"""The specification: one token, or one page, after another."""

from __future__ import annotations

from tilewise.ops.kv_write.problem import Copy, Write


def write(call: Write) -> None:
    """Tokens into their slots."""
    for token, slot in enumerate(call.slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, call.k_pages.shape[1])
            call.k_pages[page, offset].copy_(call.k[token])
            call.v_pages[page, offset].copy_(call.v[token])


def copy(call: Copy) -> None:
    """Pages onto others."""
    for source, target in call.pairs.tolist():
        if source >= 0 and target >= 0:
            call.k_pages[target].copy_(call.k_pages[source])
            call.v_pages[target].copy_(call.v_pages[source])
