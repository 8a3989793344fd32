"""What QuACK (package quack-kernels, 0.6.5) has of `cases.neighbours`, by the names that operations have there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contenders import find_peer


def find(device: str) -> tuple[dict[str, Callable[..., Any]], str]:
    """Its operations, which take inputs by name, or none, and for the record its version or why it is missing."""
    module, says = find_peer("quack", "quack", "quack-kernels", device)
    return ({} if module is None else operations(module, importlib.import_module("quack.rmsnorm"))), says


def operations(quack: Any, norms: Any) -> dict[str, Callable[..., Any]]:
    """`norms` is its module of norms, where layer norm is a forward and a backward without autograd."""

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            weight, bias = _wide(weight), _wide(bias)
            o, rstd, mean = norms.layernorm_fwd(x, weight, bias, eps=1e-5, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return o  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, do: torch.Tensor) -> Any:
            x, weight, rstd, mean = ctx.saved_tensors
            return norms.layernorm_bwd(x, weight, do, rstd, mean)

    return {
        "rms_norm": lambda x, weight: quack.rmsnorm(x, weight, eps=1e-6),
        "rms_norm, residual": lambda x, weight, residual: quack.rmsnorm(
            x, weight, residual=residual, eps=1e-6, prenorm=True
        ),
        "layer_norm": lambda x, weight, bias: LayerNorm.apply(x, weight, bias),
        "softmax": lambda x: quack.softmax(x),
        "cross_entropy": lambda x, target: quack.cross_entropy(x, target),
    }


@functools.lru_cache(maxsize=2)
def _wide(weight: torch.Tensor) -> torch.Tensor:
    """As its layer norm asks for; made once, so that a timed call does not pay for it."""
    return weight.detach().float()
