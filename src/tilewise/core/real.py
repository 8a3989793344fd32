"""Which arguments are numbers that a float holds."""

from __future__ import annotations

import numbers
import sys
from typing import Any

LARGEST = sys.float_info.max


def is_finite(value: Any) -> bool:
    """Whether `value` is a real number, no boolean, that `float` takes: neither infinite, nor NaN, nor an integer so
    large that no float holds it.
    """
    number = isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)
    return number and bool(-LARGEST <= value <= LARGEST)  # exact for integers, and what torch.compile can trace
