"""Rows of captured tensors: what is computed of their entries, and what makes one value of them, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import tilewise as tw
from tilewise.schedule.tilemap import EMPTY, FULL, TileMap

B, H, S, D = 2, 2, 96, 5
_RANDOM = torch.Generator().manual_seed(1)
BLOCKS = torch.randint(0, 6, (B, H, 6, 3), generator=_RANDOM)  # for each 16 queries, which 16 keys they see
FLAGS = torch.rand(S, D, generator=_RANDOM) < 0.5
Q_PE = torch.randn(B, H, S, D, generator=_RANDOM, dtype=torch.float64)
K_PE = torch.randn(B, S, D, generator=_RANDOM, dtype=torch.float64)
WEIGHTS = torch.randn(D, generator=_RANDOM, dtype=torch.float64)

MASKS: dict[str, Callable[..., Any]] = {
    "blocks": lambda b, h, i, j: (BLOCKS[b, h, i // 16] == (j // 16).unsqueeze(-1)).any(-1),
    "without_unsqueeze": lambda b, h, i, j: (j // 16 == BLOCKS[b, h][i // 16]).any(),
    "by_function": lambda b, h, i, j: torch.any(torch.eq(BLOCKS[b, h, i // 16], torch.unsqueeze(j // 16, -1)), dim=-1),
    "all": lambda b, h, i, j: (~FLAGS[i] | FLAGS[j]).all(-1),
    "count": lambda b, h, i, j: (FLAGS[i] & FLAGS[j]).sum(-1) > 1,
    "parity": lambda b, h, i, j: (FLAGS[i] ^ FLAGS[j]).sum() % 2 == 0,
    "amax": lambda b, h, i, j: BLOCKS[b, h, i // 16].amax(-1) * 16 >= j,
    "max_min": lambda b, h, i, j: (BLOCKS[b, h, i // 16].max() > j // 16) & (BLOCKS[b, h, i // 16, :].min() <= j // 16),
    "part": lambda b, h, i, j: BLOCKS[b, h, i // 16, 1:].sum(-1) > (j // 16) + BLOCKS[b, h, i // 16][-1],
    "entries": lambda b, h, i, j: (FLAGS[i] & FLAGS[j])[0] | (FLAGS[i] & ~FLAGS[j])[-1],
    "where": lambda b, h, i, j: torch.where(FLAGS[i], FLAGS[j], False).any(-1) | (i == j),
    "weighted": lambda b, h, i, j: (FLAGS[i].float() * WEIGHTS).sum(-1) > FLAGS[j].long().sum(-1) - 3,
    "distance": lambda b, h, i, j: (K_PE[b, i] - K_PE[b, j]).abs().mean(-1) < 1.1,
    "unary": lambda b, h, i, j: (-BLOCKS[b, h, i // 16] + 5).amin(-1).clamp(max=4) <= (j // 16),
    "kept": lambda b, h, i, j: FLAGS[i].any(-1, keepdim=True).squeeze(-1) & (i >= j).unsqueeze(0).all(),
    "dot": lambda b, h, i, j: torch.dot(Q_PE[b, h, i], K_PE[b, j]) > 0.3,
}


def every(shape: tuple[int, ...] = (B, H, S, S)) -> dict[str, torch.Tensor]:
    names = dict(zip("bhij", range(4), strict=True))
    return {name: torch.arange(shape[at]).view([-1 if n == at else 1 for n in range(4)]) for name, at in names.items()}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_pytorchs(name: str) -> None:
    expected = create_mask(MASKS[name], B, H, S, S, device="cpu")
    mask = tw.mask(MASKS[name])
    assert torch.equal(mask.evaluate(dtype=torch.float64, **every()).expand_as(expected), expected)
    tiles = TileMap.build(mask, seqlen_q=S, seqlen_k=S, batch=B, heads=H, block_m=16, block_n=16).classes
    seen = expected.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).movedim(3, -2).flatten(-2)
    assert not (seen.any(-1) & (tiles == EMPTY)).any()
    assert not (~seen.all(-1) & (tiles == FULL)).any()
    if name == "blocks":
        assert torch.equal(tiles == FULL, seen.all(-1)), "tiles of a list of blocks are all or nothing"


@pytest.mark.parametrize("name", MASKS)
def test_masks_compile_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    q = torch.randn(B, S, H, 16)
    run = lambda q: tw.attention(q, q, q, mask=MASKS[name])  # noqa: E731
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q))


@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
def test_rotary_scores_and_their_gradients(impl: str) -> None:
    """A dot product of captured rows beside that of q and k, as in multi-head latent attention."""
    q, k, v = (torch.randn(B, S, H, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    q_pe, k_pe, weights = (x.clone().requires_grad_() for x in (Q_PE, K_PE, WEIGHTS))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + (q_pe[b, h, i] * k_pe[b, j]).sum(-1) - (weights * k_pe[b, j]).amax(-1)

    leaves = (q, k, v, q_pe, k_pe, weights)
    o = tw.attention(q, k, v, mask=MASKS["blocks"], score=score, impl=impl)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 + torch.einsum("bhid,bjd->bhij", q_pe, k_pe)
    s = s - (weights * k_pe).amax(-1)[:, None, None]
    seen = create_mask(MASKS["blocks"], B, H, S, S, device="cpu")
    expected = torch.einsum("bhij,bjhd->bihd", s.masked_fill(~seen, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(o, expected)
    do = torch.randn_like(o)
    for found, exact in zip(*(torch.autograd.grad(x, leaves, do) for x in (o, expected)), strict=True):
        torch.testing.assert_close(found, exact)


def test_rows_of_one_stand_for_all() -> None:
    one, none = torch.tensor([[3]]), torch.zeros(1, 0, dtype=torch.bool)
    at = every((1, 1, S, S))
    assert torch.equal(tw.mask(lambda b, h, i, j: (one[b] == BLOCKS[b, h, j // 16]).any()).evaluate(**at)[0, 0, 0],
                       (BLOCKS[0, 0, torch.arange(S) // 16] == 3).any(-1))  # fmt: skip
    assert bool(tw.mask(lambda b, h, i, j: none[b].all() & ~none[b].any() & (none[b].sum() == 0)).evaluate(**at))
