"""Made-up queries, keys and values with the structure that trained models show, for commands that tune attention."""

from __future__ import annotations

import torch
from torch import Tensor

HEADS, HEAD_DIM, RUN = 4, 32, 64  # RUN: neighbouring tokens about one topic
OUTLIERS, SIZE = 2, 6.0  # channels of keys and queries that are larger than the others, and how much

Layer = tuple[Tensor, Tensor, Tensor]


def layers(device: torch.device, *, seqlen: int = 1024, seed: int = 0) -> dict[str, Layer]:
    """Two layers by name: "topics", whose queries attend to a few runs of keys, and "outliers", with large channels.

    Args:
        device: where the tensors are put; they are drawn on the CPU.
        seqlen: tokens.
        seed: of the random numbers.

    Returns:
        q, k and v of each layer, float32 (1, seqlen, 4, 32).
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    runs = -(-seqlen // RUN)
    topics = normal(runs, HEADS, HEAD_DIM).repeat_interleave(RUN, 0)[None, :seqlen]
    sharp = torch.linspace(2.5, 0.5, HEADS)[:, None]  # the first head attends to its own topic alone
    noise = [0.3 * normal(1, seqlen, HEADS, HEAD_DIM) for _ in "qkv"]
    local = (noise[0] + sharp * topics, noise[1] + topics, noise[2] + topics)

    q, k, v = (normal(1, seqlen, HEADS, HEAD_DIM) for _ in "qkv")
    q[..., :OUTLIERS] *= SIZE
    k[..., OUTLIERS : 2 * OUTLIERS] *= SIZE
    k += 3.0 * normal(HEADS, HEAD_DIM)  # the same for every token: a mean that smoothing takes away
    v += 2.0 * normal(HEADS, HEAD_DIM)
    made = {"topics": local, "outliers": (q, k, v)}
    return {name: tuple(x.to(device) for x in layer) for name, layer in made.items()}  # type: ignore[misc]
