"""Triton's interpreter, mended and quick enough for tests, and tiles so small that short sequences span several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.interpret.quick import quick_interpreter
from tests.interpret.small_tiles import use_tiles


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    torch.set_num_threads(1)
    with quick_interpreter():
        yield


@pytest.fixture(scope="session", autouse=True)
def _comparisons_of_scalars() -> Iterator[None]:
    """Triton 3.6's interpreter gives the comparison of two float scalars back as a float, which `&` then refuses."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    binary_op = InterpreterBuilder.binary_op
    comparisons = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)

    def mended(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in comparisons:
            return TensorHandle(op(lhs.data, rhs.data), tl.int1)
        return binary_op(self, lhs, rhs, op)

    InterpreterBuilder.binary_op = mended
    yield
    InterpreterBuilder.binary_op = binary_op


def pytest_configure(config: pytest.Config) -> None:
    # Triton's interpreter turns arrays of one element into indices, which NumPy will forbid some day
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(autouse=True)
def _wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, "wide")
