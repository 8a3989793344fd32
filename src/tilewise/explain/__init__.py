"""Insight: what attention costs and why, with nothing hidden. Nothing that computes imports this package.

- `ladder`: ten small programs from a naive matrix product to split-KV decoding, each counting its own traffic.
- `roofline`: operations, bytes, bound and floor time of a problem on a GPU.
- `operators`: what PyTorch's operators move, each a pass over memory, counted as they run.
- `neighbours`: what stands beside attention, ours and PyTorch's, and the fewest bytes it moves.
- `traffic`: memory traffic of materialised attention, FlashAttention-1 and -2 in closed form.
- `resources`: what a tile configuration takes of an SM, and whether it fits.
- `timeline`: how the warpgroups of an SM share its units under three schedules, simulated and in closed form.
- `accuracy`: errors of schemes of few bits on tensors of yours, and the fastest scheme that is accurate enough.
- `masses`, `sparsity`: where weights lie, and how few tiles of them serve on tensors of yours.
- `accumulators`: what accumulators of 13 bits lose, by the length of a sum.
- `engine_tracer`, `engine_steps`: where a step of the generation engine spends its time, measured from outside.
- `draw`: pictures of masks, tiles, traffic, rooflines, schedules and errors (needs the extra `tilewise[draw]`).
"""
