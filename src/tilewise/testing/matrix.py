"""The matrix of tests: which implementation runs which case at which dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.testing.case import Case
from tilewise.testing.properties import Setting, can_run

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def runnable(
    impls: Iterable[str], cases: Iterable[Case], dtypes: Iterable[torch.dtype] = DTYPES, device: str = "cpu"
) -> list[tuple[Setting, Case]]:
    """Every (setting, case) that the dispatch table allows, sorted by case so that neighbours share an oracle."""
    settings = [Setting(impl, dtype, device) for dtype in dtypes for impl in impls]
    return [(setting, case) for case in cases for setting in settings if can_run(setting, case)]


def name_of(value: object) -> str:
    """A test's id: `causal`, `cpu_tiled-float32`."""
    return repr(value)
