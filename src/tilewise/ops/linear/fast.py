"""A linear layer by the fastest of PyTorch's ways, whose bits depend on the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS = 8  # up to which the transposed product is faster on a CPU, with two threads or more
_ROWS_OF_NARROW = 4  # where out_features is smaller than in_features
_ONE_THREAD = 2  # fewer rows with one thread
_DOUBLED = 2048  # in_features up to which a single row is computed twice, since matrix-vector products are slower


def fast_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, as `torch.nn.functional.linear`. For inference.

    On a CPU MKL reads a float32 weight for 2 to 8 rows up to five times faster if it computes weight @ x.T, and a
    single row faster if it computes it twice (`benchmarks/NOTES.md`, "The engine on a CPU").

    Args:
        x: (rows, in_features).
        weight: (out_features, in_features), dtype and device of x.
        bias: (out_features,), likewise; None is 0.

    Returns:
        (rows, out_features), contiguous.

    Example:
        >>> from tilewise.ops.linear.fast import fast_linear
        >>> fast_linear(torch.randn(3, 64), torch.randn(100, 64)).shape
        torch.Size([3, 100])
    """
    rows = len(x)
    if x.device.type != "cpu" or x.dtype != torch.float32 or not _transposed(rows, weight):
        return F.linear(x, weight, bias)
    doubled = x.expand(2, -1).contiguous() if rows == 1 else x
    o = torch.mm(weight, doubled.t())[:, :rows].t().contiguous()
    return o if bias is None else o.add_(bias)


def _transposed(rows: int, weight: torch.Tensor) -> bool:
    """Whether weight @ x.T is faster on a CPU."""
    out_features, in_features = weight.shape
    if rows == 1:
        return in_features <= _DOUBLED
    most = _ROWS if out_features >= in_features else _ROWS_OF_NARROW
    return 1 < rows <= (most - _ONE_THREAD if torch.get_num_threads() == 1 else most)
