"""How fast this machine is: `python -m tools.machine` adds up 20 million numbers and prints what that took."""

from __future__ import annotations

import time

USUAL_S = 1.3  # of the machine whose seconds tests/seconds.json holds


def slowness() -> float:
    """What 20 million additions take, as a multiple of what they usually take: 1.0, or more where others run."""
    start, total = time.perf_counter(), 0
    for number in range(20_000_000):
        total += number
    return (time.perf_counter() - start) / USUAL_S


if __name__ == "__main__":
    found = slowness()
    print(f"20 million additions: {found * USUAL_S:.1f} s, {found:.1f} times the usual {USUAL_S} s")
