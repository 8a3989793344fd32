"""CUDA graphs of anything that launches kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")


def captured(step: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """A graph of `step`, warmed up on a stream of its own as PyTorch asks, and what its replays write."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
