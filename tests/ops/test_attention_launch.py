"""Launching kernels with tensor descriptors: fewer steps than Triton's own wrapper takes, the same arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.driver import _BASE_ARGS_FORMAT_LEN, wrap_handle_tensordesc

from tilewise.ops.attention.triton_launch import Plan, describe

SIGNATURE = {0: "*bf16", 1: "tensordesc<bf16[1, 64, 1, 64]>", 2: "tensordesc<fp32[32]>", 3: "i32"}
META = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64, 1, 64], "fp4_padded": False},
    {"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [32], "fp4_padded": False},
]


class Compiled:
    """A compiled kernel whose launcher notes its arguments, behind the wrapper of the Triton at hand."""

    launch_metadata = None

    def __init__(self, seen: list[Any]) -> None:
        self._run = SimpleNamespace(launch=wrap_handle_tensordesc(lambda *a: seen.append(a), SIGNATURE, META))

    @property
    def run(self) -> Any:
        return self._run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.run.launch(*(None,) * _BASE_ARGS_FORMAT_LEN, *arguments)


class Kernel:
    """Compiles at once and launches, as a `triton.jit` function does."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Compiled:
            self.compiled[grid](*arguments)
            return self.compiled

        return launch


@pytest.mark.parametrize("shape", [(2, 100, 3, 64), (1, 1, 3, 40), (2, 7, 1, 8)])
def test_a_launch_passes_what_tritons_wrapper_would(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: arguments)  # encodes as what it is given
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    seen: list[Any] = []
    plan = Plan(Kernel(Compiled(seen)), 1, (7,), (), (), 4, 2, boxes={1: (64, 64), 2: (32,)})
    for _ in range(3):
        q, x = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(600)
        plan.launch((q, q, x), ())
        by_wrapper: list[Any] = []
        Compiled(by_wrapper)[1,](q, describe(q, (64, 64)), describe(x, (32,)), 7)
        assert [repr(argument) for argument in seen.pop()] == [repr(argument) for argument in by_wrapper[0]]
    assert plan.encoders.keys() == {1, 2}, "Triton's wrapper was not taken off"
