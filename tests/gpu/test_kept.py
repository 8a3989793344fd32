"""Nothing kept from an earlier call makes a number wrong on a GPU, whoever writes a call's tensors in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from tests.kept import ENTRIES, Tensors, check


@triton.jit
def _copy(SOURCE, TARGET, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(TARGET + at, tl.load(SOURCE + at, mask=at < n), mask=at < n)


def by_kernel(x: torch.Tensor, values: torch.Tensor) -> None:
    """By a kernel that PyTorch knows nothing of."""
    as_bytes = [t.view(torch.uint8).flatten() for t in (values, x)]
    _copy[(1,)](*as_bytes, x.nbytes, triton.next_power_of_2(x.nbytes))


def by_graph(x: torch.Tensor, values: torch.Tensor) -> None:
    """By the replay of a CUDA graph, captured with other values."""
    source = x.clone()
    graph = torch.cuda.CUDAGraph()
    x.copy_(source)
    with torch.cuda.graph(graph):
        x.copy_(source)
    source.copy_(values)
    graph.replay()


WRITERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "kernel": by_kernel,
    "graph": by_graph,
    "data": lambda x, values: x.data.copy_(values),
}


def on_gpu(given: Tensors) -> Tensors:
    return {name: x.cuda() for name, x in given.items()}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_something_else_wrote_is_read(entry: str, writer: str) -> None:
    check(entry, WRITERS[writer], "cuda")


@pytest.mark.parametrize("entry", [name for name, one in ENTRIES.items() if one.captured])
def test_a_replay_reads_what_is_there(entry: str) -> None:
    one = ENTRIES[entry]
    given, after = on_gpu(one.start()), on_gpu(one.then())
    call = one.make(given)
    with torch.no_grad():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        for name, x in given.items():
            x.copy_(after[name])
        graph.replay()
        want = one.make(after)()
    torch.testing.assert_close(found, want, rtol=0.0, atol=0.0)
