"""Programs that keep step on Hopper. Those at one head ask for the same tiles, and what several multiprocessors ask for
at about the same time is read from L2 once. Left alone they drift apart by many tiles, reads from L2 triple, and the
GPU, at its limit of power, lowers its clock (benchmarks/NOTES.md). So who fetches waits for the others now and then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.tiles.hopper import take

LOOKS = gl.constexpr(64)  # at how many are there, some 40 us, before a program goes on and meets nobody again


@gluon.jit
def meetings_of(at, tiles, grid, fixed):
    """(how many have come to meetings in the runs before a program's `at`-th, how many come to each in this), where all
    items are equal: a run has a meeting before every `meets`-th of its tiles but the first, up to number `tiles`.
    """
    before, present = 0 * at, 0 * at
    if fixed.meets is not None:
        GROUP: gl.constexpr = fixed.group if fixed.of_keys else 1
        programs = gl.num_programs(0)
        turn = at // GROUP
        present = gl.minimum(programs, grid[0][6] - turn * programs)
        before = (turn * GROUP * programs + at % GROUP * present) * (tiles // fixed.meets)
    return before, present


@gluon.jit
def meet(MET, t, meetings, patient, fixed):
    """Wait, before a run's tile t, until all who come to this meeting have; whether it was not in vain. Nobody waits
    for long: other work may have multiprocessors for itself, so that some programs have not begun.
    """
    before, present = meetings
    if fixed.meets is not None:  # noqa: SIM102 (known when it is compiled, the other is not)
        if patient & (t > 0) & (t % fixed.meets == 0):
            take(MET)
            wanted = before + t // fixed.meets * present
            looks = 0 * t
            while (looks < LOOKS) & (gl.load(MET, volatile=True) < wanted):
                looks += 1
            patient = looks < LOOKS
    return patient
