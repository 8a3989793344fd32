"""Random numbers on the GPU, the same at every run."""

from __future__ import annotations

import torch

from tests.gpu.matrix import DEVICE


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=dtype)
