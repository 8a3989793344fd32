"""Several processes on one GPU at a time: it goes from one to another in the middle of kernels, whose results stay."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

import tilewise as tw
from tests.gpu.draws import draw
from tests.gpu.matrix import DEVICE

PROCESSES, SECONDS = 4, 4.0
Results = tuple[torch.Tensor, ...]


def _packed() -> Callable[[str], Results]:
    """Items by the hundred thousand, each dealt out."""
    q, k, v = (draw(70_000 * 16, 2, 32, seed=n) for n in range(3))
    cu_seqlens = torch.arange(0, 70_000 * 16 + 1, 16, dtype=torch.int32, device=DEVICE)
    return lambda impl: (tw.attention(q, k, v, mask=tw.causal, layout=tw.Packed(cu_seqlens), impl=impl),)


def _backward() -> Callable[[str], Results]:
    q, k, v = (draw(2, 4096, 16, 128, seed=n).requires_grad_() for n in range(3))
    do = draw(2, 4096, 16, 128, seed=9)

    def run(impl: str) -> Results:
        o = tw.attention(q, k, v, mask=tw.window(512), impl=impl)
        return (o.detach(), *torch.autograd.grad(o, (q, k, v), do))

    return run


CALLS = {"packed": _packed, "backward": _backward}


@pytest.mark.parametrize("impl", ["triton", "hopper"])
@pytest.mark.parametrize("call", CALLS)
def test_processes_may_share_the_gpu(call: str, impl: str) -> None:
    command = [sys.executable, "-m", __name__, call, impl]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) for _ in range(PROCESSES)]
    said = [process.communicate(timeout=280)[0] for process in running]
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text[-3000:]


def _close(got: Results, want: Results) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


if __name__ == "__main__":
    run, row = CALLS[sys.argv[1]](), sys.argv[2]
    reference = run("hopper" if row == "triton" else "triton")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        _close(run(row), reference)
        torch.cuda.empty_cache()  # the next results come to memory that nothing else has been in
