"""What every test on a GPU leaves behind: its memory, for the other processes that test there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
