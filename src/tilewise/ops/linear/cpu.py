"""Linear layers in PyTorch, a row at a time: each row is a matrix-vector product of the same sizes and alignment.

This relies on one fact: PyTorch gives the same bits for the same numbers, sizes and alignment. A matrix product of a
fixed number of rows would not do: where out_features is small, MKL adds in an order that depends on a row's place.
"""

from __future__ import annotations

import torch

from tilewise.ops.linear.problem import Call

Tensors = dict[str, torch.Tensor]
_ELEMENTS = 2**20  # of weight that all rows are multiplied by, while a cache holds them, before the next
_ALIGN = 16  # float32 numbers: 64 bytes, as PyTorch aligns its tensors


def forward(call: Call, results: Tensors) -> None:
    """Fills o."""
    out_features, in_features = call.weight.shape
    x = _aligned(call.x.reshape(-1, in_features))
    o = results["o"].view(-1, out_features)
    step = max(1, _ELEMENTS // in_features)
    for start in range(0, out_features, step):
        columns = slice(start, start + step)
        weight = call.weight[columns].float()
        bias = None if call.bias is None else call.bias[columns].float()
        sums = weight.new_empty(len(weight))
        for n, row in enumerate(x):
            torch.mv(weight, row, out=sums)
            o[n, columns] = sums if bias is None else sums.add_(bias)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A float32 copy of rows, each of which begins at a multiple of 64 bytes."""
    rows, width = x.shape
    return torch.empty(rows, -(-width // _ALIGN) * _ALIGN)[:, :width].copy_(x)
