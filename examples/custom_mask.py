"""A mask of your own: a window of recent keys, and the first few that every query keeps (Xiao et al., 2023).

Run: python examples/custom_mask.py
"""

import torch

import tilewise as tw
from tilewise.schedule.tilemap import TileMap

SEQLEN, HEADS, HEAD_DIM = 1024, 4, 32
WINDOW, FIRST = 128, 4


def recent_or_first(b, h, i, j):
    """Visible: causal, and either recent or among the first keys."""
    return (i >= j) & ((i - j < WINDOW) | (j < FIRST))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch, with the SEQLEN x SEQLEN mask that tilewise does not build."""
    i, j = torch.arange(SEQLEN)[:, None], torch.arange(SEQLEN)
    visible = recent_or_first(None, None, i, j)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=visible).transpose(1, 2)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, HEADS, HEAD_DIM) for _ in range(3))

    mask = tw.mask(recent_or_first)  # traced once; a plain function works too
    print("traced:", mask)

    by_name = tw.causal & (tw.window(WINDOW) | tw.prefix(torch.tensor([FIRST])))  # the same from the library
    o = tw.attention(q, k, v, mask=mask)
    torch.testing.assert_close(o, tw.attention(q, k, v, mask=by_name))
    torch.testing.assert_close(o, dense(q, k, v))

    tiles = TileMap.build(mask, seqlen_q=SEQLEN, seqlen_k=SEQLEN, block_m=128, block_n=128)
    print(f"equal to dense attention; {tiles.density():.0%} of the 128 x 128 tiles are visited")

    print(tw.why(q, k, v, mask=mask))


if __name__ == "__main__":
    main()
