"""What attention costs and why. No package that computes imports this one.

- `ladder`: ten small programs from a naive matrix product to split-KV decoding, each counting its own traffic.
- `guesses`: eight methods that guess tokens and check them in one forward, each counting forwards of the target.
- `roofline`: operations, bytes, bound and floor time of a problem on a GPU.
- `operators`: the bytes that PyTorch's operators move, counted as they run.
- `neighbours`: fused layers, tilewise's and PyTorch's, and the fewest bytes that they move.
- `traffic`: memory traffic of materialised attention, FlashAttention-1 and -2 in closed form.
- `resources`: what a tile configuration takes of an SM, and whether it fits.
- `timeline`: how the warpgroups of an SM share its units under three schedules, simulated and in closed form.
- `accuracy`: errors of quantisation schemes on tensors of yours, and the fastest scheme that is accurate enough.
- `masses`, `sparsity`: weights by tile, and the fewest tiles that are accurate enough on tensors of yours.
- `accumulators`: the error of accumulators of 13 bits, by the length of a sum.
- `engine_tracer`, `engine_steps`: where a step of the generation engine spends its time, measured from outside.
- `draw`: pictures of masks, tiles, traffic, rooflines, schedules and errors (needs the extra `tilewise[draw]`).
"""
