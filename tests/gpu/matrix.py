"""Which Triton row runs which case, worked out without a GPU, so that the tests can be listed and counted anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar
from unittest import mock

import torch
import triton  # noqa: F401  # before the environment is changed: Triton reads it when functions are decorated

from tilewise.ops.attention.rows import needs
from tilewise.testing.case import Case
from tilewise.testing.matrix import Check, property_matrix, runnable
from tilewise.testing.properties import Setting

DEVICE = "cuda"
IMPLS = ("hopper", "triton", "triton_decode")
T = TypeVar("T")


def _as_if_there_was_a_gpu(build: Callable[[], T]) -> T:
    """The interpreter's CPU tensors satisfy every need of the Triton rows; no kernel is imported meanwhile."""
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        mock.patch.object(needs, "_no_hopper", return_value=None),
    ):
        return build()


def on_gpu(setting: Setting) -> Setting:
    return replace(setting, device=DEVICE)


def case_matrix(cases: Iterable[Case], dtypes: Iterable[torch.dtype]) -> list[tuple[Setting, Case]]:
    """Every (setting, case) that the dispatch table allows on a GPU."""
    small = {case.name: case for case in cases}
    # what a row needs depends on no length beyond a few hundred, and the largest cases are slow to make on a CPU
    probes = [case.with_(batch=2) if case.batch > 1000 else case for case in small.values()]
    found = _as_if_there_was_a_gpu(lambda: runnable(IMPLS, probes, dtypes))
    return [(on_gpu(setting), small[case.name]) for setting, case in found]


def properties_matrix(dtypes: Iterable[torch.dtype]) -> list[tuple[Check, Setting, Case]]:
    """Every (property, setting, case) that the dispatch table allows on a GPU."""
    found = _as_if_there_was_a_gpu(lambda: property_matrix(IMPLS, dtypes))
    return [(check, on_gpu(setting), case) for check, setting, case in found]
