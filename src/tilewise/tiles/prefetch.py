"""Memory that is brought into the L2 cache before who reads it asks for it."""

import torch
import triton
import triton.language as tl

from tilewise.core.dispatch import capability

_LINE = 128  # bytes
LINE = tl.constexpr(_LINE)


def can_fetch(device: torch.device) -> bool:
    """Whether `fetch` is for this device; 80 stands for the interpreter, which has no instructions written out."""
    return capability(device) >= 90


def lines_of(x: torch.Tensor) -> int:
    """How many lines hold a row of the last dimension, at most, if it begins with one."""
    return -(-x.shape[-1] * x.element_size() // _LINE)


@triton.jit
def fetch(pointers, LINES: tl.constexpr):
    """Have some lines from each pointer on brought into the cache. Nothing is waited for."""
    places = pointers.to(tl.int64, bitcast=True)
    for n in tl.static_range(LINES):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [places + n * LINE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
