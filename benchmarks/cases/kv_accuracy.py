"""Question `kv_accuracy`: how far attention over an encoded cache is from attention over the keys and values as they
were, by kind of code, with keys as they are, rotated and by channel (4 or 2 bits, in pages of 64 tokens, beside values
of 4 bits), on a CPU.

The error is that of o against float64 attention over what was encoded, as a share of the size of o: in the L2 norm of
all of o, and of the largest element (largest difference over largest value). Queries are not rounded, so that codes are
all that differs; rotated are keys and queries, by `tilewise.quant.rotate`, and never values.

All numbers are drawn from N(0, 1) and rounded to bfloat16 before they are encoded. "channels" shifts 8 channels of each
head's keys, the same for all its tokens, by 8 N(0, 1), as keys of models have such channels (Liu et al., "KIVI", 2024):
weights stay as they were, but scales grow. "sparse" adds N(0, 100) to each number of q, k and v with probability 0.001,
the distribution on which Shah et al., "FlashAttention-3", 2024, measure FP8.
"""

from __future__ import annotations

import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.environment import current
from benchmarks.records import Writer
from tilewise.quant import KINDS, encode, encode_by_channel, rotate
from tilewise.quant.channels import BITS
from tools.families import FAMILIES

DRAWN = ("gaussian", "channels", "sparse")
PAGE_SIZE, HEADS_Q, HEADS_KV, HEAD_DIM, QUERIES = 16, 8, 2, 128, 32
CHANNEL_PAGE_SIZE = 64  # what a scale covers, by channel
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(options: Options) -> None:
    """One record for each draw, measure, kind of code, and keys as they are, rotated or by channel."""
    tokens = 4096 if not options.quick else 64
    method = f"one request of {QUERIES} queries over {tokens} tokens, drawn with a seed; attention in float32"
    writer = Writer(current("cpu"), method=method, ceilings=(None, None), results=options.out)
    for name in DRAWN:
        if not options.wants(name):
            continue
        q, k, v = drawn(name, tokens)
        want = tw.attention(*(x[None].double() for x in (q, k, v)), impl="reference")[0]
        found = {
            f"{kind}{'.rotated' * rotated}": over_codes(q, k, v, kind, rotated)
            for rotated in (False, True)
            for kind in KINDS
        }
        found |= {f"int4.keys{bits}": over_codes(q, k, v, "int4", False, bits) for bits in BITS}
        for kind, o in found.items():
            for measure, error in errors(o, want).items():
                writer.write(
                    "kv_accuracy",
                    {"workload": f"{name}, {measure}", "seqlen_k": tokens, "seqlen_q_each": QUERIES,
                     "num_heads_q": HEADS_Q, "num_heads_kv": HEADS_KV, "head_dim": HEAD_DIM},
                    f"tilewise.{kind}",
                    percent=100 * error,
                    includes="the error of o as a share of its size, in the L2 norm or of the largest element",
                    sources=FAMILIES["quant"].hash(),
                )  # fmt: skip


def drawn(name: str, tokens: int) -> Tensors:
    """q (queries, heads_q, head_dim), k (tokens, heads_kv, head_dim) and v, float32 that bfloat16 holds."""
    make = torch.Generator().manual_seed(DRAWN.index(name))
    shapes = ((QUERIES, HEADS_Q, HEAD_DIM), (tokens, HEADS_KV, HEAD_DIM), (tokens, HEADS_KV, HEAD_DIM))
    q, k, v = (torch.randn(shape, generator=make) for shape in shapes)
    if name == "channels":
        for head in range(HEADS_KV):
            k[:, head, torch.randperm(HEAD_DIM, generator=make)[:8]] += 8 * torch.randn(8, generator=make)
    if name == "sparse":
        for x in (q, k, v):
            x += (torch.rand(x.shape, generator=make) < 0.001) * 10 * torch.randn(x.shape, generator=make)
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    return q, k, v


def over_codes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, rotated: bool, bits: int | None = None
) -> torch.Tensor:
    """o (queries, heads_q, head_dim) over encoded pages; with `bits`, of keys by channel, all of them full."""
    if rotated:
        q, k = rotate(q), rotate(k)
    page_size = PAGE_SIZE if bits is None else CHANNEL_PAGE_SIZE
    k, v = (x.unflatten(0, (-1, page_size)) for x in (k, v))
    keys = encode(k, kind) if bits is None else encode_by_channel(k.bfloat16(), bits)
    table = torch.arange(len(k), dtype=torch.int32)[None]
    layout = tw.Paged(table, torch.tensor([len(k) * page_size], dtype=torch.int32))
    return tw.attention(q[None], keys, encode(v, kind), layout=layout)[0]


def errors(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Relative L2, and the largest difference over the largest value."""
    off = got.double() - want
    return {"L2": float(off.norm() / want.norm()), "largest": float(off.abs().max() / want.abs().max())}
