"""Insight: what attention costs and why, with nothing hidden. Nothing that computes imports this package.

- `ladder`: ten small programs from a naive matrix product to split-KV decoding, each counting its own traffic.
- `roofline`: operations, bytes, bound and floor time of a problem on a GPU.
- `traffic`: memory traffic of materialised attention, FlashAttention-1 and -2 in closed form.
- `passes`: what the operators of a PyTorch call read and write, counted while it runs.
- `neighbours`: what stands beside attention, the library's and PyTorch's, and the bytes it must move.
- `resources`: what a tile configuration takes of an SM, and whether it fits.
- `timeline`: how the warpgroups of an SM share its units under three schedules, simulated and in closed form.
- `draw`: pictures of masks, tiles, traffic, rooflines and schedules (needs the extra `tilewise[draw]`).
"""
