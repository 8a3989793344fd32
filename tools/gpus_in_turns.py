"""A pytest plugin: of processes that test side by side, each takes another of a machine's GPUs for its first.

It has to be loaded before anything asks CUDA for its devices, as `-p` does.
"""

from __future__ import annotations

import os
from pathlib import Path

VISIBLE, WORKER = "CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER"


def in_turn(worker: str, gpus: int) -> str:
    """The GPUs as the process called gw0, gw1, ... sees them."""
    first = int(worker.removeprefix("gw"))
    return ",".join(str((first + n) % gpus) for n in range(gpus))


def _gpus() -> int:
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


if WORKER in os.environ and VISIBLE not in os.environ and _gpus() > 1:
    os.environ[VISIBLE] = in_turn(os.environ[WORKER], _gpus())
