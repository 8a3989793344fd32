"""Modules by this library's operations, whose constructors, parameters and `state_dict` are those of torch.nn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.core.errors import InputError
from tilewise.core.flags import check_flags
from tilewise.ops.cross_entropy import cross_entropy
from tilewise.ops.norm import Output, layer_norm, rms_norm
from tilewise.ops.softmax import log_softmax, softmax

__all__ = ["CrossEntropyLoss", "LayerNorm", "LogSoftmax", "RMSNorm", "Softmax"]


class RMSNorm(torch.nn.RMSNorm):
    """`tilewise.rms_norm` along the last dimension, in place of `torch.nn.RMSNorm`.

    Args:
        normalized_shape: the width, an int or a sequence of one.
        eps: None is `torch.finfo(x.dtype).eps`.
        elementwise_affine: whether there is a weight (width,), 1 at first.
        device, dtype: of the weight.

    Raises:
        InputError: more than one dimension, or an elementwise_affine that is no bool.

    Source: as `tilewise.rms_norm`.

    Example:
        >>> norm = tw.nn.RMSNorm(64)
        >>> o, x = norm(torch.randn(2, 100, 64), residual=torch.randn(2, 100, 64))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flags(elementwise_affine=elementwise_affine)
        super().__init__(_one_dimension(normalized_shape), eps, elementwise_affine, device, dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:  # type: ignore[override]
        """Normalise x, or with `residual` x + residual.

        Args:
            x, residual: (..., width), as `tilewise.rms_norm` takes them.

        Returns:
            o, or with `residual` (o, x + residual).

        Raises:
            InputError: as `tilewise.rms_norm` raises it.
        """
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

    Raises:
        InputError: more than one dimension, or an elementwise_affine or bias that is no bool.

    Source: as `tilewise.layer_norm`.

    Example:
        >>> o = tw.nn.LayerNorm(64)(torch.randn(2, 100, 64))
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
        check_flags(elementwise_affine=elementwise_affine, bias=bias)
        super().__init__(_one_dimension(normalized_shape), eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:  # type: ignore[override]
        """Normalise x, or with `residual` x + residual.

        Args:
            x, residual: (..., width), as `tilewise.layer_norm` takes them.

        Returns:
            o, or with `residual` (o, x + residual).

        Raises:
            InputError: as `tilewise.layer_norm` raises it.
        """
        return layer_norm(x, self.weight, self.bias, residual=residual, eps=self.eps)


class Softmax(torch.nn.Softmax):
    """`tilewise.softmax` along `dim`, in place of `torch.nn.Softmax`: a row of only -inf gives 0, not NaN.

    Args:
        dim: the dimension whose sum is 1.

    Raises:
        InputError: dim is None, with which torch.nn chooses one by the number of dimensions.

    Example:
        >>> o = tw.nn.Softmax(dim=-1)(torch.randn(100, 64))
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(_chosen(dim))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The softmax of input.

        Args:
            input: as `tilewise.softmax` takes x.

        Returns:
            o in the shape and dtype of input.

        Raises:
            InputError: as `tilewise.softmax` raises it.
        """
        return softmax(input, _chosen(self.dim))


class LogSoftmax(torch.nn.LogSoftmax):
    """`tilewise.log_softmax` along `dim`, in place of `torch.nn.LogSoftmax`: a row of only -inf gives -inf, not NaN.

    Args:
        dim: the dimension along which exp(o) has the sum 1.

    Raises:
        InputError: dim is None, with which torch.nn chooses one by the number of dimensions.

    Example:
        >>> o = tw.nn.LogSoftmax(dim=-1)(torch.randn(100, 64))
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(_chosen(dim))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The logarithm of the softmax of input.

        Args:
            input: as `tilewise.softmax` takes x.

        Returns:
            o in the shape and dtype of input.

        Raises:
            InputError: as `tilewise.softmax` raises it.
        """
        return log_softmax(input, _chosen(self.dim))


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`tilewise.cross_entropy`, in place of `torch.nn.CrossEntropyLoss` with class indices as targets.

    Args:
        weight, size_average, reduce: None; torch.nn has class weights, and has deprecated the other two.
        ignore_index: tokens with this target have no loss and zero gradients.
        reduction: "mean" over tokens that are not ignored, "sum" or "none".
        label_smoothing: from 0 to 1.

    Raises:
        InputError: weight, size_average or reduce is given.

    Source: as `tilewise.cross_entropy`.

    Example:
        >>> loss = tw.nn.CrossEntropyLoss()(torch.randn(100, 1000), torch.randint(1000, (100,)))
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        for name, given, hint in (
            ("weight", weight, "torch.nn.CrossEntropyLoss has class weights"),
            ("size_average", size_average, "use reduction='mean' or 'sum'"),
            ("reduce", reduce, "use reduction='none'"),
        ):
            if given is not None:
                raise InputError(name, got=type(given).__name__, expected="None", hint=hint)
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of logits.

        Args:
            input: logits (classes,), (tokens, classes) or (batch, classes, ...), floating point.
            target: int64 classes, () or (tokens,) or (batch, ...).

        Returns:
            The loss, float32 (float64 for float64): a scalar, or with "none" in the shape of target.

        Raises:
            InputError: as `tilewise.cross_entropy` raises it.
        """
        return cross_entropy(
            input.movedim(1, -1) if input.ndim > 2 else input,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


def _chosen(dim: int | None) -> int:
    if dim is None:
        raise InputError("dim", got="None", expected="an int, the dimension that adds up to 1", hint="-1 is the last")
    return dim


def _one_dimension(normalized_shape: int | Sequence[int]) -> list[int]:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if len(shape) != 1:
        raise InputError(
            "normalized_shape", got=shape, expected="one dimension, the width", hint="flatten the dimensions first"
        )
    return shape
