"""Peak extra memory of one call: by PyTorch's allocator on a GPU, by resident size in a fresh process on a CPU."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
PAGE = 4096
SAMPLE_S = 0.0005
Call = Callable[[], object]


def gpu_peak_mib(call: Call) -> float:
    """MiB that the CUDA allocator held at most during `call`, above what it held before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def cpu_peak_mib(prepare: Callable[..., tuple[Call, Call]], *args: Any) -> float:
    """MiB of resident memory that a call adds at most, in a new process, sampled every half millisecond.

    `prepare(*args)`, a function of a module, returns (small, call): `small` loads the code and is not measured.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, prepare, args))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:
        raise MemoryError("the process that was measured died") from None
    finally:
        process.join()


def _child(sender: Any, prepare: Callable[..., tuple[Call, Call]], args: tuple[Any, ...]) -> None:
    small, call = prepare(*args)
    small()
    peak = before = _resident()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident())
            time.sleep(SAMPLE_S)

    sampler = threading.Thread(target=sample)
    sampler.start()
    call()
    done.set()
    sampler.join()
    sender.send((peak - before) / MIB)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
