"""Cases and inputs for the tests of attention over pages."""

from __future__ import annotations

from typing import Any

import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CPU_CASES, alibi, causal, softcap, window
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAGED_CASES = [case for case in CPU_CASES if case.memory == "dense" and not case.dropout]
LARGE = [
    Case("decode", batch=9, seqlen_q=1, seqlen_k=3000, heads_q=32, heads_kv=8, head_dim=128, head_dim_v=128),
    Case("decode_window", batch=5, seqlen_q=1, seqlen_k=3000, heads_q=8, heads_kv=8, head_dim=64, head_dim_v=64,
         mask=window(700)),
    Case("verify", batch=4, seqlen_q=6, seqlen_k=2000, heads_q=16, heads_kv=2, head_dim=128, head_dim_v=128,
         mask=causal, score=softcap),
    Case("chunk", batch=2, seqlen_q=500, seqlen_k=1300, heads_q=8, heads_kv=2, head_dim=128, head_dim_v=128,
         mask=causal, score=alibi),
    Case("wide", batch=3, seqlen_q=2, seqlen_k=700, heads_q=8, heads_kv=1, head_dim=256, head_dim_v=256, mask=causal),
    Case("wider", batch=3, seqlen_q=2, seqlen_k=300, heads_q=4, heads_kv=1, head_dim=512, head_dim_v=512, mask=causal),
    Case("own_heads", batch=3, seqlen_q=1, seqlen_k=2500, heads_q=32, heads_kv=32, head_dim=128, head_dim_v=128),
    Case("many_heads", batch=2, seqlen_q=2, seqlen_k=900, heads_q=128, heads_kv=128, head_dim=192, head_dim_v=128,
         mask=causal),
    Case("one_head_of_keys", batch=2, seqlen_q=1, seqlen_k=1500, heads_q=71, heads_kv=1, head_dim=64, head_dim_v=64),
    Case("mixed", packed=((1, 900), (700, 700), (0, 40), (1, 1), (5, 2100), (1, 0), (64, 65)), heads_q=12, heads_kv=4,
         head_dim=128, head_dim_v=128, mask=causal, sink=True),
]  # fmt: skip
UP_TO_256 = [case for case in LARGE if case.head_dim <= 256]


def decoding(
    lengths: list[int], page_size: int = 16
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], tw.Paged]:
    """(q, pool, layout) of a new token for each request of so many, keys of 128 for 32 heads on 8."""
    case = Case("decode", packed=tuple((1, n) for n in lengths), heads_q=32, heads_kv=8, head_dim=128, head_dim_v=128)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    pool = paged(inputs, page_size)
    return inputs.q.detach(), (pool.k, pool.v), pool.layout


def lengths_around_pages(impl: str, mask: Any, head_dim: int, page_sizes: tuple[int, ...] = (16, 64, 256)) -> None:
    """What lies behind the last key of a page is NaN, in K and in V."""
    ends = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 257, 300, 1000)
    packed = tuple((max(0, n - 40), n) for n in ends)
    case = Case("ends", packed=packed, heads_q=4, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim, mask=mask)
    for page_size in page_sizes:
        properties.pages_hold_the_keys(Setting(impl, torch.bfloat16, DEVICE), case, page_size)
