"""Compile Triton launches for a GPU that is not there.

The real host code runs, and each launch compiles instead of running.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tilewise.core.dispatch import Row
from tilewise.ops.assembled import inspected
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import HOPPER
from tilewise.ops.attention.table import named
from tilewise.ops.kv_write.problem import Copy, Write
from tilewise.ops.merge.problem import Call as MergeCall
from tilewise.ops.operation import Operation, fields_of
from tilewise.ops.qkv_prologue.problem import Call as Prologue
from tilewise.ops.triton_operands import too_wide
from tilewise.ops.uniform_registers import read_unset
from tilewise.testing.barriers import reused_barriers
from tilewise.testing.instructions import instructions, launch

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one block may use, in bytes, by compute capability (CUDA C++ Programming Guide, table of
technical specifications)."""
TENSOR_MEMORY = 512  # columns that a multiprocessor has where there are any


@dataclass(frozen=True)
class Resources:
    """What the assembler gave one kernel, from the compiled binary."""

    kernel: str
    registers: int
    spill_bytes: int  # stack frame of a thread: registers that did not fit
    shared_bytes: int
    tensor_core: int  # matrix instructions in the PTX
    code: str = ""  # what the kernel does (`instructions.instructions`)
    launch: str = ""  # how the host launched it (`instructions.launch`)


class Launches(list[Any]):
    """Compiled kernels in the order of their launches; `how` describes each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.how: list[str] = []

    def resources(self) -> list[Resources]:
        """What the assembler gave each, and its launch."""
        return [dataclasses.replace(resources(kernel), launch=how) for kernel, how in zip(self, self.how, strict=True)]


@contextmanager
def compiling_for(sm: int) -> Iterator[Launches]:
    """Inside, every Triton launch with CPU tensors compiles for compute capability `sm`.

    Yields the list of compiled kernels, which grows with each launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from tilewise.ops import triton_compile, triton_launch
    from tilewise.ops.attention import triton_codes, triton_plans
    from tilewise.ops.quantize import triton_quantize
    from tilewise.tiles import early

    class OfflineDriver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", sm, 32)

        def get_current_device(self) -> int:
            return sm  # Triton keeps compiled kernels by device: one for each target

        def get_active_torch_device(self) -> str:
            return "cpu"

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled = Launches()
    real_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = real_run(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            note(kernel, grid, args, kwargs)
        return kernel

    def note(kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        compiled.append(kernel)
        compiled.how.append(launch(grid, arguments, options))

    def start(kernel: Any, grid: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        note(kernel, (grid,), arguments, options)

    before = getattr(triton.runtime.driver, "_active", None)
    triton.runtime.driver.set_active(OfflineDriver())
    try:
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(triton_launch, "start", start),
            mock.patch.object(triton_compile, "shared_limit", return_value=SHARED_LIMIT[sm]),
            mock.patch.object(early, "capability", return_value=sm),
            mock.patch.object(triton_plans, "capability", return_value=sm),
            mock.patch.object(triton_quantize, "capability", return_value=sm),
            mock.patch.object(triton_codes, "capability", return_value=sm),
            mock.patch.object(triton_launch, "remember", False),
        ):
            yield compiled
    finally:
        if before is not None:
            triton.runtime.driver.set_active(before)
        else:
            triton.runtime.driver._active = None


def compile_call(call: Call, sm: int, row: str = "triton") -> list[Resources]:
    """Compile every kernel that `call` launches through a row of the dispatch table, forward and backward.

    Args:
        call: with CPU tensors; only dtypes, shapes, strides and alignment matter.
        sm: compute capability, 80, 90 or 100.
        row: the name of one that runs Triton kernels.
    """
    import torch

    found = named(row)
    with compiling_for(sm) as kernels:
        o, lse = found.function(found.forward)(call)
        if found.backward is not None and call.pages is None and call.scheme is None:  # which has exact rows' backward
            found.function(found.backward)(call, o, lse, torch.empty_like(o), torch.empty_like(lse))
    return kernels.resources()


def compile_merge(call: MergeCall, sm: int) -> list[Resources]:
    """As `compile_call`, the kernels that a call of `merge` or `merge_states` launches."""
    from tilewise.ops.merge import triton_merge

    with compiling_for(sm) as kernels:
        o, lse = triton_merge.forward(call)
        triton_merge.backward(call, o, lse)
    return kernels.resources()


def compile_kv_write(call: Write | Copy, sm: int) -> list[Resources]:
    """As `compile_call`, the kernel that a call of `kv_write` or `copy_pages` launches."""
    from tilewise.ops.kv_write import triton_kv_write

    with compiling_for(sm) as kernels:
        triton_kv_write.write(call) if isinstance(call, Write) else triton_kv_write.copy(call)
    return kernels.resources()


def compile_qkv_prologue(call: Prologue, sm: int) -> list[Resources]:
    """As `compile_call`, the kernel that a call of `qkv_prologue` launches."""
    from tilewise.ops.qkv_prologue import triton_qkv_prologue

    with compiling_for(sm) as kernels:
        triton_qkv_prologue.forward(call)
    return kernels.resources()


def compile_operation(
    operation: Operation[Any],
    call: Any,
    sm: int,
    wanted: Sequence[str] = (),
    incoming: Sequence[Any] = (),
) -> list[Resources]:
    """As `compile_call`, the kernels that a call of an operation launches, forward and backward for every gradient, or
    for the gradients `wanted` where these come in; of each row that such a GPU runs.
    """
    import torch

    with compiling_for(sm) as kernels, torch.no_grad():
        for row in operation.rows:
            if not _runs_on(sm, row, call):
                continue
            results = operation.run_forward(row, call)
            wanted = wanted or operation.sources(name for name, x in fields_of(call).items() if x.requires_grad)
            if wanted:
                kept = operation.kept(call, results)
                incoming = incoming or [torch.empty_like(x) for x in list(results.values())[: operation.count(call)]]
                operation.run_backward(row, operation.without(call, kept), kept, incoming, wanted)
    return kernels.resources()


def _runs_on(sm: int, row: Row[Any], call: Any) -> bool:
    """Of the Triton row, and on Hopper of the one for Hopper, where nothing but the GPU is missing."""
    if row.name == "hopper" and sm == 90:
        return all(need.unmet(call) is None for need in row.needs if need.says != HOPPER.says)
    return row.name == "triton"


def resources(kernel: Any) -> Resources:
    """Registers, spills and shared memory of a compiled kernel; an AssertionError for one that Triton made a trap of,
    which no launch would take, because it wants more tensor memory than there is, for one whose barriers' memory is
    something else, too, for one with operands that are wider than what they multiply, and for one of Hopper's with
    products of what lies at addresses that are not set.
    """
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    assert columns <= TENSOR_MEMORY, f"{kernel.metadata.name}: {columns} columns of tensor memory"
    wide = too_wide(kernel.asm.get("ttgir", ""))
    assert not wide, f"{kernel.metadata.name}: lanes hold more than the inner dimension of a product: {wide[0]}"
    reused = reused_barriers(kernel.asm["ptx"])
    assert not reused, f"{kernel.metadata.name}: memory of barriers that is something else, too, at {reused}"
    report = _inspected(kernel, "cuobjdump", "--dump-resource-usage")
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    matrix = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", kernel.asm["ptx"]))
    if "wgmma" in kernel.asm["ptx"]:
        unset = read_unset(_inspected(kernel, "nvdisasm", "-c"))
        assert not unset, f"{kernel.metadata.name} multiplies what lies at addresses that are not set: {unset[:3]}"
    spilled = usage["STACK"] + usage["LOCAL"]
    code = instructions(kernel)
    return Resources(kernel.metadata.name, usage["REG"], spilled, kernel.metadata.shared, matrix, code)


def _inspected(kernel: Any, tool: str, option: str) -> str:
    """What one of the binary tools that come with Triton prints about a compiled kernel."""
    return inspected(kernel.asm["cubin"], tool, option)


def exponentials_in_flight(kernel: Any, instruction: str = "MUFU.EX2") -> list[int]:
    """How many exponentials, by the `instruction` that makes one, each warpgroup takes between its wait that leaves
    products running and its wait for them, from the disassembly of a Hopper kernel: none would mean that the two do not
    overlap.
    """
    events = re.findall(rf"DEPBAR\.LE gsb0, 0x([0-2])|({re.escape(instruction)})", _inspected(kernel, "nvdisasm", "-c"))
    found: list[int] = []
    counting = False
    for wait, _ in events:
        if wait:
            counting = wait != "0"
            if counting:
                found.append(0)
        elif counting:
            found[-1] += 1
    return found


def spilled_in_loops(kernel: Any) -> list[int]:
    """How often each innermost loop with products reads or writes spilled registers."""
    return in_loops(kernel, r"\b(?:LDL|STL)\b")


def spilled_before_roles(kernel: Any) -> int:
    """How many registers a Hopper kernel spills before its warps part: what several roles would work out, worked out
    once, for all of them to read again and again.
    """
    return len(re.findall(r"\bSTL\b", _inspected(kernel, "nvdisasm", "-c").split("USETMAXREG")[0]))


def in_loops(kernel: Any, instruction: str) -> list[int]:
    """How often an instruction, a pattern, stands in each innermost loop with products, from a Hopper kernel's
    disassembly. A loop is what a conditional branch goes back over; what only waits lies behind all loops.
    """
    lines: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in _inspected(kernel, "nvdisasm", "-c").splitlines():
        label = re.match(r"(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(lines)
        lines.append(line)
        back = re.search(r"@!?U?P\d\s+BRA\b.*`\((\.L_\w+)\)", line)
        if back and back[1] in labels and any(re.search("[HIQ]GMMA", x) for x in lines[labels[back[1]] :]):
            loops.append((labels[back[1]], len(lines)))
    inner = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    return [len(re.findall(instruction, "\n".join(lines[a:b]))) for a, b in inner]
