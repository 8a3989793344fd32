"""Sparse attention in a small video diffusion transformer: tokens of a video and of its text go through all layers in
tile order, and nothing else of the model changes.

First with sliding tiles (Zhang et al., 2025), with a window per head in one call; the reference is the same model in
raster order, with a dense mask per head. Then with tiles predicted from each layer's queries and keys (SpargeAttention,
Zhang et al., 2025), selected at one sampling step and reused at the next.

Run: python examples/video_dit.py
"""

import math

import torch
from torch import nn
from torch.nn import functional

import tilewise as tw
from tilewise.schedule.tilemap import EMPTY, PARTIAL, TileMap

CANVAS, TILE, TEXT = (6, 8, 12), (2, 4, 4), 13  # latent frames, height and width; 3 x 2 x 3 tiles of 32 tokens
WINDOWS = [(1, 1, 1), (3, 1, 1), (1, 2, 3), (2, 1, 2)]  # of each head, in tiles
LAYERS, HEADS, HEAD_DIM, CHANNELS = 3, len(WINDOWS), 24, 8
WIDTH, VIDEO = HEADS * HEAD_DIM, math.prod(CANVAS)


class Block(nn.Module):
    """Attention and a gated-by-time MLP, each behind a norm that the time modulates (Peebles and Xie, 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, time: torch.Tensor, rope: tw.Rope, attend) -> torch.Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(time)[:, None].chunk(6, -1)
        y = functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = tw.rope(q, k, rope=rope)
        x = x + gate * self.out(attend(q, k, v).flatten(2))
        return x + gate_mlp * self.mlp(functional.layer_norm(x, (WIDTH,)) * (1 + scale_mlp) + shift_mlp)


class VideoDiT(nn.Module):
    """Predicts noise in a latent video (batch, CHANNELS, *CANVAS) from text (batch, TEXT, WIDTH) and times (batch,)."""

    def __init__(self, attend, order: tw.TokenOrder | None = None) -> None:
        super().__init__()
        self.patch, self.last = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.attend, self.order = attend, order

    def forward(self, noisy: torch.Tensor, text: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-torch.arange(WIDTH // 2) / 8)
        time = torch.cat([f(times[:, None] * frequencies) for f in (torch.sin, torch.cos)], -1)
        x = torch.cat([self.patch(noisy.flatten(2).mT), text], 1)  # raster order, text behind
        index = torch.arange(VIDEO + TEXT)
        if self.order is not None:  # once, before all layers; positions go with their tokens
            x, index = self.order.apply(x), self.order.index
        rope = tw.Rope(*tables(), positions=index.repeat(len(x)))
        for block in self.blocks:
            x = block(x, time, rope, self.attend)
        x = x if self.order is None else self.order.undo(x)
        return self.last(x[:, :VIDEO]).mT.unflatten(-1, CANVAS)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of places in raster order: a third of a head turns by each axis, text by none."""
    places = torch.cartesian_prod(*map(torch.arange, CANVAS))
    axes = [tw.rope_tables(HEAD_DIM // 3, size, base=100.0) for size in CANVAS]
    cos, sin = (torch.cat([t[k][places[:, axis]] for axis, t in enumerate(axes)], -1) for k in (0, 1))
    return functional.pad(cos, (0, 0, 0, TEXT), value=1.0), functional.pad(sin, (0, 0, 0, TEXT))


def every_pair() -> torch.Tensor:
    """bool (HEADS, tokens, tokens) in raster order, coordinate by coordinate: what the reference keeps in memory."""
    places = torch.cartesian_prod(*map(torch.arange, CANVAS))
    near = torch.ones(HEADS, VIDEO, VIDEO, dtype=torch.bool)
    for head, window in enumerate(WINDOWS):
        for axis, count in enumerate(window):
            tile = places[:, axis] // TILE[axis]
            first = (tile - count // 2).clamp(0, CANVAS[axis] // TILE[axis] - count)[:, None]
            near[head] &= (tile >= first) & (tile < first + count)
    return functional.pad(near, (0, TEXT, 0, TEXT), value=True)


class Predicted:
    """Attention over tiles that are predicted from a layer's queries and keys, once: later steps use them again."""

    def __init__(self, select: tw.Select) -> None:
        self.select, self.chosen, self.layer = select, [], 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if len(self.chosen) < LAYERS:
            self.chosen.append(tw.select_tiles(q, k, self.select))
        o = tw.attention(q, k, v, select=self.chosen[self.layer])
        self.layer = (self.layer + 1) % LAYERS
        return o


def main() -> None:
    torch.manual_seed(0)
    sliding_tiles()
    predicted_tiles()


def predicted_tiles() -> None:
    """Two steps of sampling, the second with the tiles of the first."""
    order = tw.TokenOrder(CANVAS, TILE, text=TEXT)
    whole = VideoDiT(tw.attention, order)
    text, times = torch.randn(1, TEXT, WIDTH), torch.tensor([0.8])
    noisy = torch.randn(1, CHANNELS, *CANVAS).cumsum(-1).cumsum(-2)  # neighbours are alike
    off = {}
    for far in ("drop", "summary"):
        attend = Predicted(tw.Select(tw.Sparge(0.5, -1.0), tw.window(1, 1), block=32, far=far))
        few = VideoDiT(attend, order)
        few.load_state_dict(whole.state_dict())
        with torch.no_grad():
            for step in range(2):
                want, found = (model(noisy * (1 - 0.05 * step), text, times - 0.05 * step) for model in (whole, few))
                off[far] = float((found - want).norm() / want.norm())
        tiles = sum(float(chosen.density()) for chosen in attend.chosen) / LAYERS
        print(f"{tiles:.0%} of the tiles, the rest {far!r}: outputs off by {off[far]:.1e} at the second step")
    assert off["summary"] < 0.5 * off["drop"] < 0.1


def sliding_tiles() -> None:
    order = tw.TokenOrder(CANVAS, TILE, text=TEXT)
    mask = tw.sliding_tile(CANVAS, TILE, WINDOWS, text=TEXT)
    print(mask)
    tokens = VIDEO + TEXT
    tiles = TileMap.build(mask, seqlen_q=tokens, seqlen_k=tokens, heads=HEADS, block_m=32, block_n=32)
    for window, classes in zip(WINDOWS, tiles.classes[0], strict=True):
        visited, partial = (classes != EMPTY).float().mean(), int((classes == PARTIAL).sum())
        print(f"window {window}: {visited:.1%} of the 32 x 32 tiles are visited, {partial} of them partly visible")

    seen = every_pair()
    sparse = VideoDiT(lambda q, k, v: tw.attention(q, k, v, mask=mask), order)
    dense = VideoDiT(lambda *qkv: functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in qkv), attn_mask=seen).transpose(1, 2))  # fmt: skip
    dense.load_state_dict(sparse.state_dict())

    noisy, text, times = torch.randn(2, CHANNELS, *CANVAS), torch.randn(2, TEXT, WIDTH), torch.tensor([0.3, 0.8])
    results = {}
    for name, model in (("sliding tiles", sparse), ("dense mask", dense)):
        predicted = model(noisy, text, times)
        predicted.square().mean().backward()
        results[name] = predicted, model.blocks[0].qkv.weight.grad
    print(
        f"the dense mask has {seen.numel():,} entries, {seen.float().mean():.0%} of them visible; tilewise builds none"
    )
    for what, ours, theirs in zip(("outputs", "gradients"), *results.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
        print(f"{what} match: {(ours - theirs).abs().max():.1e} of {theirs.abs().max():.1e}")


if __name__ == "__main__":
    main()
