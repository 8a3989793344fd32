"""What tests of the benchmarks need."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks PyTorch finds no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
