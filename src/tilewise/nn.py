"""Modules by this library's operations, whose constructors, parameters and `state_dict` are those of torch.nn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.core.errors import InputError
from tilewise.ops.norm import Output, layer_norm, rms_norm

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(torch.nn.RMSNorm):
    """`tilewise.rms_norm` along the last dimension, in place of `torch.nn.RMSNorm`.

    Args:
        normalized_shape: the width, an int or a sequence of one.
        eps: None takes `torch.finfo(x.dtype).eps`.
        elementwise_affine: whether there is a weight (width,), 1 at first.
        device, dtype: of the weight.

    Raises InputError for more than one dimension.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(_one_dimension(normalized_shape), eps, elementwise_affine, device, dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:  # type: ignore[override]
        """o, or with `residual` (o, x + residual), as `tilewise.rms_norm` has them."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, residual=residual, eps=eps)


class LayerNorm(torch.nn.LayerNorm):
    """`tilewise.layer_norm` along the last dimension, in place of `torch.nn.LayerNorm`.

    Args:
        normalized_shape: the width, an int or a sequence of one.
        eps: added to the variance.
        elementwise_affine: whether there are a weight (width,), 1 at first, and a bias.
        bias: whether there is a bias (width,), 0 at first, beside the weight.
        device, dtype: of weight and bias.

    Raises InputError for more than one dimension.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(_one_dimension(normalized_shape), eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:  # type: ignore[override]
        """o, or with `residual` (o, x + residual), as `tilewise.layer_norm` has them."""
        return layer_norm(x, self.weight, self.bias, residual=residual, eps=self.eps)


def _one_dimension(normalized_shape: int | Sequence[int]) -> list[int]:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if len(shape) != 1:
        raise InputError(
            "normalized_shape", got=shape, expected="one dimension, the width", hint="flatten the dimensions first"
        )
    return shape
