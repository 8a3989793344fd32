"""A linear layer for inference, batch-invariant: the bits of a row are the same in every batch."""

from __future__ import annotations

import torch

from tilewise.ops.linear.problem import make_call
from tilewise.ops.linear.table import LINEAR


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, batch-invariant: a row's bits depend only on that row, weight and bias.

    They depend neither on the number of rows nor on the row's place among them. `torch.nn.functional.linear` does not
    promise that: cuBLAS and MKL choose the order of additions by the number of rows. Bits may differ between
    implementations, GPUs, versions of Triton and PyTorch, and on a CPU between numbers of threads. Sums are float32,
    without TF32. For inference: there is no backward.

    Args:
        x: (..., in_features), float16, bfloat16 or float32; there may be 0 rows, and rows may lie apart. Without unit
            stride in its last dimension x is copied first.
        weight: (out_features, in_features), of the dtype of x.
        bias: (out_features,), of the dtype of x; None is 0.
        out_dtype: None for the dtype of x, or torch.float32, which leaves sums as they are (for logits).
        impl: "triton", "cpu" or "reference"; None takes the first one that can run the call.

    Returns:
        (..., out_features).

    Raises:
        InputError: an argument is wrong, or takes a gradient where gradients are recorded.
        UnsupportedError: `impl`, or without it every implementation, cannot run this call.

    Source: He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025.

    Example:
        >>> from tilewise.ops.linear import linear
        >>> x, weight = torch.randn(5, 64), torch.randn(100, 64)
        >>> torch.equal(linear(x, weight)[3], linear(x[3], weight))
        True
    """
    return LINEAR(make_call(x, weight, bias, out_dtype), impl)[0]
