"""The specification: one block of one head after another."""

from __future__ import annotations

import math

import torch

from tilewise.ops.quantize.problem import NUMBERS, Call, alone, of_values, parts
from tilewise.quant.blocks import KEY_ORDER, keys_of_mean, row_groups, rows_of_block
from tilewise.quant.codes import SMALLEST
from tilewise.quant.rotation import matrix
from tilewise.schedule.selection import SHORTEST

Tensors = dict[str, torch.Tensor]


def forward(call: Call, results: Tensors) -> None:
    """Fills codes, and those of scale, mean, bias and sums that there are; those of values that come along, too."""
    for x in results.values():
        x.zero_()
    if call.beside is not None:
        forward(call.beside, of_values(results))
    for x, other, into in parts(call, alone(results)):
        for head in range(call.heads if x.shape[0] else 0):
            y = _prepared(call, x[:, head].float(), None if other is None else other[head], head, into)
            if call.kind in NUMBERS:
                into["codes"][:, head] = y.to(NUMBERS[call.kind])
            elif call.columns:
                if call.spanned:
                    into["most"][head] = torch.where(y.isfinite(), y.abs(), torch.inf).amax(0)
                _values(call, y, into["codes"][head], into["scale"][head])
            else:
                _rows(call, y, into["codes"][:, head], into["scale"][head])


def _prepared(call: Call, x: torch.Tensor, other: torch.Tensor | None, head: int, into: Tensors) -> torch.Tensor:
    """Rows of one head, centred and rotated; means and biases are written."""
    rows = rows_of_block(call.side)
    for block, part in enumerate(torch.split(x.double(), rows) if call.sums else ()):
        length = part.norm(dim=-1, keepdim=True)
        into["sum"][head, block] = part.sum(0)
        into["unit_sum"][head, block] = (part / torch.where(length < SHORTEST, torch.inf, length)).sum(0)
    if call.smooth and call.side == "q":
        blocks = torch.split(x, rows)
        for block, part in enumerate(blocks):
            into["mean"][head, block] = part.double().mean(0).float().to(call.x.dtype)
        x = torch.cat([part - into["mean"][head, block].float() for block, part in enumerate(blocks)])
    elif call.smooth:
        into["mean"][head] = (keys_of_mean(x) if call.side == "k" else x).double().mean(0)
        x = x - into["mean"][head]
    if other is not None:
        into["bias"][head] = x.double() @ other.double()
    return (x.double() @ matrix(call.dim, 0, x.device).double()).float() if call.rotate else x


def _rows(call: Call, y: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Queries or keys of one head (seqlen, dim); codes likewise, scales (blocks, groups)."""
    rows, groups = rows_of_block(call.side), row_groups(call.side, call.shared)
    for block, start in enumerate(range(0, len(y), rows)):
        tile = y[start : start + rows]
        for group in sorted(set(groups)):
            members = [r for r in range(len(tile)) if groups[r] == group]
            scale = _scale_of(y if call.shared == "head" else tile[members], call.largest)
            scales[block, group] = scale
            codes[[start + r for r in members]] = _nearest(tile[members], scale, call.kind).to(codes.dtype)


def _values(call: Call, y: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Values of one head (seqlen, dim); codes (dim, keys of all blocks), scales (dim,) or (blocks, 1)."""
    keys = rows_of_block("v")
    for block, start in enumerate(range(0, len(y), keys)):
        tile = y[start : start + keys]
        # places inside 16 take turns as products want them
        place = torch.tensor([start + r // 16 * 16 + KEY_ORDER.index(r % 16) for r in range(len(tile))])
        for channel in range(y.shape[1]):
            among = {"block": tile, "head": y, "channel": y[:, channel]}[call.shared]
            scale = _scale_of(among, call.largest)
            scales[(block, 0) if call.shared == "block" else channel] = scale
            codes[channel, place] = _nearest(tile[:, channel], scale, "fp8").to(codes.dtype)


def _scale_of(among: torch.Tensor, largest: float) -> torch.Tensor:
    """Of the numbers that share it."""
    if not among.isfinite().all():
        return torch.tensor(math.nan)
    scale = among.abs().amax() / torch.tensor(largest) if among.numel() else torch.tensor(0.0)
    return scale if scale >= SMALLEST else torch.tensor(0.0)


def _nearest(y: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Codes as float32; 0 where the scale is 0 or NaN."""
    if not scale > 0:
        return torch.zeros_like(y)
    y = y * (1.0 / scale)
    return y.to(torch.float8_e4m3fn).float() if kind == "fp8" else y.round()
