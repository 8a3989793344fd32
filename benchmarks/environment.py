"""What a record says about where it was made: machine, driver, versions, commit, command, date."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("--out", "--resume")  # options that name places of one machine


@dataclass(frozen=True)
class Environment:
    """`device` is the GPU's name from its driver, or "cpu: <model>, <n> cores"; `date` is UTC, to the second."""

    device: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str
    command: str
    date: str


def current(device: str = "cuda") -> Environment:
    """The environment of this process for benchmarks that run on `device` ("cuda" or "cpu")."""
    on_gpu = device == "cuda"
    return Environment(
        device=torch.cuda.get_device_name() if on_gpu else f"cpu: {_processor()}, {os.cpu_count()} cores",
        driver=_driver() if on_gpu else None,
        torch=torch.__version__,
        triton=version("triton"),
        commit=commit(),
        command=command(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def version(package: str) -> str | None:
    """Installed version of `package`, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Short commit id, "+changes" after it where tracked files differ; TILEWISE_COMMIT where there is no git.

    Raises:
        ValueError: TILEWISE_COMMIT is no commit id: a name is soon another commit's.
    """
    given = os.environ.get("TILEWISE_COMMIT")
    if given:
        if not re.fullmatch("[0-9a-f]{7,40}", given):
            raise ValueError(f"TILEWISE_COMMIT: got {given!r}, expected a commit id, 7 to 40 hexadecimal digits")
        return given
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+changes" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def command() -> str:
    """The command line of this process, as one types it in the repository's root, without PLACES and other folders."""
    arguments = sys.argv[1:]
    for option in (*PLACES, "--model"):
        if option in arguments:
            place = arguments.index(option)
            if option in PLACES or Path(*arguments[place + 1 : place + 2]).is_dir():
                arguments = arguments[:place] + arguments[place + 2 :]
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    if module is None:
        return shlex.join([Path(sys.argv[0]).name, *arguments])
    return shlex.join(["python", "-m", module.name.removesuffix(".__main__"), *arguments])


def _output(*words: str) -> str | None:
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _driver() -> str | None:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
