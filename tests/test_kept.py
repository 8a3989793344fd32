"""Nothing kept from an earlier call makes a number wrong, whoever writes a call's tensors between two calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.kept import ENTRIES, check

WRITERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {  # PyTorch counts a version for the last alone
    "numpy": lambda x, values: np.copyto(x.numpy(), values.numpy()),
    "dlpack": lambda x, values: torch.from_dlpack(x).copy_(values),
    "data": lambda x, values: x.data.copy_(values),
    "storage": lambda x, values: x.untyped_storage().copy_(values.untyped_storage()),
    "in place": lambda x, values: x.copy_(values),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_something_else_wrote_is_read(entry: str, writer: str) -> None:
    check(entry, WRITERS[writer], "cpu")
