"""Other work on the GPU, for tests of programs that begin late."""

import triton
import triton.language as tl


@triton.jit
def occupy(X, nanoseconds):
    """Registers of a multiprocessor, for so long."""
    begin = tl.extra.cuda.globaltimer()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(X + at)
    while tl.extra.cuda.globaltimer() - begin < nanoseconds:
        x += 1.0
    tl.store(X + at, x)
