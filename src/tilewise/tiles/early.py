"""Kernels that are launched while the one before still runs (programmatic dependent launch), on GPUs that can."""

import torch
import triton
import triton.language as tl

from tilewise.core.dispatch import capability

# EARLY of a kernel is 0 where it is not, or says when it waits for the end of the one before
AT_FIRST, BEHIND = tl.constexpr(1), tl.constexpr(2)


def early_for(device: torch.device, behind: bool = False) -> int:
    """What a kernel has for EARLY where GPUs can launch it so: it waits AT_FIRST, or, where what it needs is from those
    before the one before, BEHIND its own work.
    """
    if capability(device) < 90:
        return 0
    return BEHIND.value if behind else AT_FIRST.value


@triton.jit
def begin_early(EARLY: tl.constexpr):
    """Wait for the end of the kernel before, AT_FIRST or by `end_early`. Only then may the next one be launched: for
    one BEHIND, all that was before its predecessor is complete.
    """
    if EARLY == AT_FIRST:
        tl.extra.cuda.gdc_wait()
    if EARLY == BEHIND:
        _wait_as_last()
    if EARLY > 0:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait_as_last():
    """The next kernel is launched when all programs have said that it may be: so it is enough that one waits, the last,
    which begins when there is nothing left to wait for, mostly.
    """
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()


@triton.jit
def end_early(EARLY: tl.constexpr):
    """So that who waits for this kernel waits for the one before it, too."""
    if EARLY == BEHIND:
        tl.extra.cuda.gdc_wait()
