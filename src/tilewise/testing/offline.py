"""Compile Triton launches for a GPU that is not there: the real host code runs, and each launch compiles instead of running."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Resources:
    """What the assembler reports of one kernel."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core: int  # matrix instructions in the PTX


@contextmanager
def compiling_for(sm: int) -> Iterator[list[Any]]:
    """Inside, every Triton launch with CPU tensors compiles for compute capability `sm`; yields the list of compiled kernels."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from tilewise.ops.attention import triton_attention, triton_launch

    class OfflineDriver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", sm, 32)

        def get_current_device(self) -> int:
            return sm  # Triton keeps compiled kernels by device: one for each target

        def get_active_torch_device(self) -> str:
            return "cpu"

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled: list[Any] = []
    real_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = real_run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    before = triton.runtime.driver._active if hasattr(triton.runtime.driver, "_active") else None
    triton.runtime.driver.set_active(OfflineDriver())
    try:
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(triton_attention, "capability", lambda device: sm),
            mock.patch.object(triton_launch, "remember", False),
        ):
            yield compiled
    finally:
        if before is not None:
            triton.runtime.driver.set_active(before)


def resources(kernel: Any, sm: int) -> Resources:
    """Assemble a compiled kernel with ptxas and read its report."""
    import triton

    ptx = kernel.asm["ptx"]
    suffix = "a" if sm >= 90 else ""
    tool = "ptxas-blackwell" if sm >= 100 else "ptxas"
    ptxas = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin", tool)
    if not os.path.exists(ptxas):
        ptxas = os.path.join(os.path.dirname(ptxas), "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as handle:
            handle.write(ptx)
        command = [ptxas, "-v", f"--gpu-name=sm_{sm}{suffix}", source, "-o", source + ".cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers is not None
    matrix = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx))
    spilled = sum(map(int, spills.groups())) if spills else 0
    return Resources(kernel.metadata.name, int(registers.group(1)), spilled, kernel.metadata.shared, matrix)
