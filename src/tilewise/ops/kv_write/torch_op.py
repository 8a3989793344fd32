"""Writes as PyTorch sees them: a plain call in eager mode, inside torch.compile custom operators that change pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.core.dispatch import Row
from tilewise.ops.kv_write.problem import Call, Copy, Write, check_values
from tilewise.ops.kv_write.table import ROWS
from tilewise.quant import ByChannel
from tilewise.rotary import Rope

_BY_NAME = {row.name: row for row in ROWS}
_PAGES = ("k_pages", "v_pages")


def run(row: Row[Call], call: Call) -> None:
    """The work itself; afterwards autograd knows that the pages are others."""
    name, index = ("write", call.slots) if isinstance(call, Write) else ("copy", call.pairs)
    if not index.numel() or not call.k_pages.numel():
        return
    row.function(name)(call)
    counted = [pages for pages in call.changed if not pages.is_inference()]
    torch.autograd.graph.increment_version(counted)


def _rope(parts: Sequence[torch.Tensor], interleaved: bool) -> Rope | None:
    """Of no parts none."""
    if not parts:
        return None
    cos, sin, positions = parts
    return Rope(cos, sin, positions, interleaved)


def _write(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor,
    rope: Sequence[torch.Tensor], interleaved: bool, impl: str,
) -> None:  # fmt: skip
    call = Write(k, v, k_pages, v_pages, slots, None, _rope(rope, interleaved))
    check_values(call)  # nothing had a value when torch.compile saw the arguments
    run(_BY_NAME[impl], call)


def _write_encoded(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, k_scale: torch.Tensor,
    v_scale: torch.Tensor, slots: torch.Tensor, rope: Sequence[torch.Tensor], interleaved: bool, impl: str,
) -> None:  # fmt: skip
    call = Write(k, v, k_pages, v_pages, slots, (k_scale, v_scale), _rope(rope, interleaved))
    check_values(call)
    run(_BY_NAME[impl], call)


def _write_by_channel(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, k_scale: torch.Tensor,
    v_scale: torch.Tensor, least: torch.Tensor, opened: torch.Tensor, place: torch.Tensor, slots: torch.Tensor,
    rope: Sequence[torch.Tensor], interleaved: bool, impl: str,
) -> None:  # fmt: skip
    channels = ByChannel(k_pages, k_scale, least, opened, place)
    call = Write(k, v, k_pages, v_pages, slots, (k_scale, v_scale), _rope(rope, interleaved), channels)
    check_values(call)
    run(_BY_NAME[impl], call)


def _copy(k_pages: torch.Tensor, v_pages: torch.Tensor, pairs: torch.Tensor, impl: str) -> None:
    call = Copy(k_pages, v_pages, pairs)
    check_values(call)
    run(_BY_NAME[impl], call)


write_operator = torch.library.custom_op("tilewise::kv_write", _write, mutates_args=_PAGES)
encoded_operator = torch.library.custom_op(
    "tilewise::kv_write_encoded", _write_encoded, mutates_args=(*_PAGES, "k_scale", "v_scale")
)
by_channel_operator = torch.library.custom_op(
    "tilewise::kv_write_by_channel", _write_by_channel,
    mutates_args=(*_PAGES, "k_scale", "v_scale", "least", "opened"),
)  # fmt: skip
copy_operator = torch.library.custom_op("tilewise::copy_pages", _copy, mutates_args=_PAGES)


def compiled_write(row: Row[Call], call: Write) -> None:
    """Through the custom operator, which torch.compile keeps whole."""
    rope = call.rope
    angles = [] if rope is None else [rope.cos, rope.sin, rope.positions]
    how = (angles, rope is not None and rope.interleaved, row.name)
    if call.scales is None:
        write_operator(call.k, call.v, call.k_pages, call.v_pages, call.slots, *how)
    elif call.channels is not None:
        channels = (call.channels.least, call.channels.open, call.channels.place)
        by_channel_operator(call.k, call.v, call.k_pages, call.v_pages, *call.scales, *channels, call.slots, *how)
    else:
        encoded_operator(call.k, call.v, call.k_pages, call.v_pages, *call.scales, call.slots, *how)


def compiled_copy(row: Row[Call], call: Copy) -> None:
    """Through the custom operator, which torch.compile keeps whole."""
    copy_operator(call.k_pages, call.v_pages, call.pairs, row.name)
