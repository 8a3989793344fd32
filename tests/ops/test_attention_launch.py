"""Launching kernels: fewer steps than Triton takes between a compiled kernel and the driver, the same arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler.compiler import CompiledKernel

from tilewise.ops.triton_launch import Plan, describe

DESCRIBED = {0: "*bf16", 1: "tensordesc<bf16[1, 64, 1, 64]>", 2: "tensordesc<fp32[32]>", 3: "i32"}
META = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64, 1, 64], "fp4_padded": False},
    {"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [32], "fp4_padded": False},
]
PLAIN = {0: "*bf16", 1: "*bf16", 2: "*fp32", 3: "i32"}


def compiled_kernel(seen: list[Any], signature: dict[int, str], scratch: int) -> CompiledKernel:
    """One of Triton's, whose last step notes its arguments instead of calling the driver."""
    run = object.__new__(CudaLauncher)
    run.launch = wrap_handle_tensordesc(lambda *a: seen.append(a), signature, META if signature is DESCRIBED else [])
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size, run.global_scratch_align = scratch, 8
    run.profile_scratch_size, run.profile_scratch_align = 0, 1
    kernel = object.__new__(CompiledKernel)
    kernel.module, kernel.function, kernel.name = object(), 1234, "kernel"
    kernel._run, kernel.packed_metadata, kernel.src = run, (4, 2), None
    kernel.hash, kernel.asm, kernel.metadata = "sound", {}, SimpleNamespace(shared=1024)
    return kernel


class Kernel:
    """Compiles at once, as a `triton.jit` function does that is not launched."""

    def __init__(self, compiled: CompiledKernel) -> None:
        self.compiled = compiled

    def run(self, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> CompiledKernel:
        assert warmup
        return self.compiled


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: arguments)  # encodes as what it is given
    driver = SimpleNamespace(utils=utils, get_current_device=lambda: 2, get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr("tilewise.ops.triton_compile.shared_limit", lambda: 2048)
    monkeypatch.setattr("tilewise.ops.triton_launch._scratch", lambda size, *_: f"{size} bytes")


def shown(arguments: tuple[Any, ...]) -> list[str]:
    """Without the hooks, which are called where there are any: see below."""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    return [repr(x) for x in arguments if x is not None and x not in hooks and not hasattr(x, "extras")]


@pytest.mark.parametrize("scratch", [0, 512])
@pytest.mark.parametrize("shape", [(2, 100, 3, 64), (1, 1, 3, 40), (2, 7, 1, 8)])
def test_a_launch_passes_what_triton_would(shape: tuple[int, ...], scratch: int) -> None:
    seen: list[Any] = []
    kernel = compiled_kernel(seen, DESCRIBED, scratch)
    plan = Plan(Kernel(kernel), 5, (7,), (), (), 4, 2, boxes={1: (64, 64), 2: (32,)}, scratch=scratch > 0)
    for _ in range(3):
        q, x = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(600)
        plan.launch((q, q, x), ())
        by_triton: list[Any] = []
        compiled_kernel(by_triton, DESCRIBED, scratch)[5, 1, 1](q, describe(q, (64, 64)), describe(x, (32,)), 7)
        assert shown(seen.pop()) == shown(by_triton[0])
    assert plan.encoders.keys() == {1, 2}, "Triton's own steps were taken"


def test_a_launch_without_descriptors_passes_what_triton_would() -> None:
    seen: list[Any] = []
    kernel = compiled_kernel(seen, PLAIN, 0)
    plan = Plan(Kernel(kernel), 5, (7,), (), (), 4, 2)
    q, x = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(600)
    for _ in range(2):
        plan.launch((q, q, x), ())
    first, second = map(shown, seen)
    assert first == second


def test_hooks_see_every_launch() -> None:
    """Profilers hang hooks on Triton's launches."""
    hook = lambda metadata: None  # noqa: E731
    seen: list[Any] = []
    plan = Plan(Kernel(compiled_kernel(seen, PLAIN, 0)), 5, (), (), (), 4, 2)
    chain = triton.knobs.runtime.launch_enter_hook
    plan.launch((), ())
    plan.launch((), ())
    assert chain not in seen.pop(), "no hook, no call of one"
    chain.add(hook)
    try:
        plan.launch((), ())
    finally:
        chain.remove(hook)
    assert chain in seen.pop()
