"""What every test on a GPU finds and leaves behind in its memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """New tensors hold NaN, so that a kernel shows which reads what nobody wrote; other processes test there, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*determinis")
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what `torch.empty` gives
        yield
        torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
