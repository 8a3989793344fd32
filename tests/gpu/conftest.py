"""What processes that test on GPUs share: the GPUs, in turns, and their memory, which each test gives back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

GPUS = torch.cuda.device_count()
if GPUS > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:  # before CUDA is initialised: each process begins at its own
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + n) % GPUS) for n in range(GPUS))


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
