"""Codes in PyTorch, all blocks of a sequence at once."""

from __future__ import annotations

import torch

from tilewise.ops.quantize.problem import NUMBERS, Call, alone, of_values, parts
from tilewise.quant.blocks import KEY_ORDER, keys_of_mean, row_groups, rows_of_block
from tilewise.quant.codes import SMALLEST
from tilewise.quant.rotation import rotate
from tilewise.schedule.selection import SHORTEST

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills codes, and those of scale, mean, bias and sums that there are; those of values that come along, too."""
    for x in results.values():
        x.zero_()  # slots that no block has
    if call.beside is not None:
        forward(call.beside, of_values(results))
    for x, other, into in parts(call, alone(results)):
        if x.shape[0]:
            _encode(call, x.float(), other, into)


def _encode(call: Call, x: torch.Tensor, other: torch.Tensor | None, into: Tensors) -> None:
    """One sequence, x (seqlen, heads, dim) in float32."""
    rows = rows_of_block(call.side)
    if call.sums:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        units = x / torch.where(length < SHORTEST, torch.inf, length)
        into["sum"].copy_(_blocks(x, rows).sum(1).transpose(0, 1))
        into["unit_sum"].copy_(_blocks(units, rows).sum(1).transpose(0, 1))
    if call.side == "q" and call.smooth:
        counts = _blocks(x.new_ones(x.shape[0], 1, 1), rows).sum(1)
        means = (_blocks(x.double(), rows).sum(1) / counts).float().to(call.x.dtype)  # (blocks, heads, dim)
        into["mean"].copy_(means.transpose(0, 1))
        x = x - means.float().repeat_interleave(rows, 0)[: x.shape[0]]
    elif call.smooth:
        into["mean"].copy_((keys_of_mean(x) if call.side == "k" else x).double().mean(0))
        x = x - into["mean"]
    if other is not None:
        into["bias"].copy_((x * other).sum(-1).T)
    if call.kind in NUMBERS:
        into["codes"].copy_(x)
        return
    if call.rotate:
        x = rotate(x)
    size = torch.where(x.isfinite(), x.abs(), torch.inf)
    if call.columns:
        _columns(call, x, size, into)
        return
    largest = _blocks(size, rows).amax(-1)  # (blocks, rows, heads)
    if call.shared == "head":
        largest = largest.amax((0, 1), keepdim=True).expand_as(largest)
    group = torch.tensor(row_groups(call.side, call.shared), device=x.device)
    empty = largest.new_zeros(largest.shape[0], int(group[-1]) + 1, largest.shape[2])
    by_group = empty.scatter_reduce(1, group[None, :, None].expand_as(largest), largest, "amax")
    scale = _scale(by_group, call.largest)
    into["scale"].copy_(scale.permute(2, 0, 1))
    by_row = scale[:, group].flatten(0, 1)[: x.shape[0], :, None]
    into["codes"].copy_(_codes(x, by_row, call.kind))


def _columns(call: Call, x: torch.Tensor, size: torch.Tensor, into: Tensors) -> None:
    """Values, keys side by side."""
    keys = rows_of_block("v")
    if call.shared == "block":
        scale = _scale(_blocks(size, keys).amax((1, 3)), call.largest)  # (blocks, heads)
        into["scale"].copy_(scale.T[..., None])
        by_row = scale.repeat_interleave(keys, 0)[: x.shape[0], :, None]
    else:
        into["most"].copy_(size.amax(0))
        largest = size.amax((0, 2) if call.shared == "head" else 0)
        scale = _scale(largest[:, None].expand(size.shape[1:]) if call.shared == "head" else largest, call.largest)
        into["scale"].copy_(scale)
        by_row = scale
    codes = _blocks(_codes(x, by_row, "fp8"), keys)
    codes = codes.view(codes.shape[0], -1, 16, *codes.shape[2:])[:, :, list(KEY_ORDER)]
    into["codes"].copy_(codes.permute(3, 4, 0, 1, 2).flatten(2))


def _blocks(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(seqlen, ...) as (blocks, rows, ...), zeros behind the last row."""
    blocks = -(-x.shape[0] // rows)
    more = x.new_zeros(blocks * rows - x.shape[0], *x.shape[1:])
    return torch.cat([x, more]).view(blocks, rows, *x.shape[1:])


def _scale(largest: torch.Tensor, code: float) -> torch.Tensor:
    scale = largest / largest.new_full((), code)
    scale = torch.where(scale < SMALLEST, 0.0, scale)
    return torch.where(largest.isfinite(), scale, torch.nan)


def _codes(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """The nearest codes, as float32."""
    x = torch.where(scale > 0, x * (1.0 / scale), 0.0)
    return x.to(torch.float8_e4m3fn).float() if kind == "fp8" else x.round()
