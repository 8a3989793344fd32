"""Sequences of different lengths without padding, in two ways that must agree: a packed layout, or document numbers.

Run: python examples/packed_documents.py
"""

import torch

import tilewise as tw

LENGTHS = [300, 1, 0, 211]
HEADS_Q, HEADS_KV, HEAD_DIM = 8, 2, 32


def main() -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q = torch.randn(total, HEADS_Q, HEAD_DIM, requires_grad=True)
    k, v = (torch.randn(total, HEADS_KV, HEAD_DIM, requires_grad=True) for _ in range(2))

    # Packed: one sequence after another. Positions start again in each, and `b` is the number of the sequence.
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = tw.causal & tw.window(64)
    packed, lse = tw.attention_with_lse(q, k, v, mask=mask, layout=tw.Packed(cu_seqlens))
    print("packed:  ", tuple(packed.shape), "lse", tuple(lse.shape))

    # The same as one row of `total` tokens in which no query sees another document.
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    one_row = tw.attention(q[None], k[None], v[None], mask=mask & tw.document(ids))
    print("document:", tuple(one_row.shape))
    torch.testing.assert_close(packed, one_row[0])

    do = torch.randn_like(packed)
    ours = torch.autograd.grad(packed, (q, k, v), do)
    theirs = torch.autograd.grad(one_row, (q, k, v), do[None])
    for name, one, other in zip("qkv", ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        print(f"d{name} agrees")


if __name__ == "__main__":
    main()
