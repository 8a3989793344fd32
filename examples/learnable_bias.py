"""Tensors that a score captures are parameters: a student learns its teacher's distance penalties and sinks.

The teacher's attention has a slope for each head (ALiBi, Press et al., 2021) and a logit for each head that takes
probability and gives nothing. The student sees q, k, v and the teacher's outputs only.

Run: python examples/learnable_bias.py
"""

import torch

import tilewise as tw

BATCH, SEQLEN, HEADS, HEAD_DIM, STEPS = 2, 64, 4, 16, 90


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Causal attention with a learned penalty on distance and a learned sink, one number per head each."""
    return tw.attention(q, k, v, mask=tw.causal, score=lambda s, b, h, i, j: s - slopes[h] * (i - j), sink=sink)


def main() -> None:
    torch.manual_seed(0)
    true_slopes, true_sink = torch.tensor([0.5, 0.25, 0.125, 0.0]), torch.tensor([1.0, 0.0, -1.0, 2.0])
    slopes, sink = torch.zeros(HEADS, requires_grad=True), torch.zeros(HEADS, requires_grad=True)
    optimizer = torch.optim.Adam([slopes, sink], lr=0.1)

    for step in range(STEPS):
        q, k, v = (torch.randn(BATCH, SEQLEN, HEADS, HEAD_DIM) for _ in range(3))
        loss = (attend(q, k, v, slopes, sink) - attend(q, k, v, true_slopes, true_sink)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.2e}")

    print("slopes", [round(x, 2) for x in slopes.tolist()], "of", true_slopes.tolist())
    print("sink  ", [round(x, 2) for x in sink.tolist()], "of", true_sink.tolist())
    torch.testing.assert_close(slopes.detach(), true_slopes, atol=0.05, rtol=0)
    torch.testing.assert_close(sink.detach(), true_sink, atol=0.1, rtol=0)


if __name__ == "__main__":
    main()
