"""Whether memory of a kernel's barriers is nothing else, from its PTX.

A barrier in shared memory that is set up and then never used has no life as Triton sees it, and its bytes may go to
what else needs some, as the outcome of an atomic. While a program is on its multiprocessor that does no harm; when the
GPU has been another process's meanwhile, what stood there is not what was written.
"""

from __future__ import annotations

import re

BYTES = 8  # of a barrier
_SUM = re.compile(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);")
_BASE = re.compile(r"mov\.[bu]32\s+(%r\d+), global_smem;")
_ACCESS = re.compile(
    r"(mbarrier\.init|mbarrier\.inval|ld|st)\.shared\S*\s[^;\[]*\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?\s*\]"
)


def reused_barriers(ptx: str) -> list[int]:
    """Where barriers are set up in shared memory, and never given up, whose bytes are loaded or stored as something
    else: their addresses, of those that the PTX knows.
    """
    known = {"global_smem": 0} | dict.fromkeys(_BASE.findall(ptx), 0)
    for name, base, offset in _SUM.findall(ptx):
        if base in known:
            known[name] = known[base] + int(offset)
    found: dict[str, set[int]] = {"mbarrier.init": set(), "mbarrier.inval": set(), "ld": set(), "st": set()}
    for what, base, offset in _ACCESS.findall(ptx):
        if base in known:
            found[what].add(known[base] + int(offset or 0))
    barriers, others = found["mbarrier.init"] - found["mbarrier.inval"], found["ld"] | found["st"]
    return sorted(barrier for barrier in barriers if any(barrier <= other < barrier + BYTES for other in others))
