"""Resolve every extra under constraints.txt for each supported Python: `python -m tools.check_constraints`.

It needs `uv` and a network, and reads nothing but the metadata of packages. uv resolves for another Python than the
one that runs, environment markers included, which pip does not. Triton is the one that constraints.txt names, as with
PyTorch's CPU build; the NVIDIA packages of the CUDA build, which the package index has, are not counted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.families import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.10", "3.11.5", "3.12", "3.13")  # pymdown-extensions, of the docs extra, needs 3.11.5
EXTRAS = ("test", "docs")  # the others are parts of test
CUDA = ("nvidia-", "cuda-")  # what the CUDA build of PyTorch brings


def pins(lines: Iterable[str], python: str) -> dict[str, list[str]]:
    """The versions that hold for a Python on Linux, by package; one each where the file is right."""
    minor = ".".join(python.split(".")[:2])
    full = python if python.count(".") == 2 else f"{python}.0"
    here = {"python_version": minor, "python_full_version": full, "platform_system": "Linux", "sys_platform": "linux"}
    found: dict[str, list[str]] = {}
    for line in lines:
        if not (text := line.partition("#")[0].strip()):
            continue
        pin = Requirement(text)
        if pin.marker is None or pin.marker.evaluate(here):
            found.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    return found


def resolved(python: str, constraints: Path) -> dict[str, str]:
    """The versions that an install of every extra takes, by package.

    Raises:
        RuntimeError: nothing satisfies the constraints; the message is uv's.
    """
    triton = re.findall(r"^triton==.*$", constraints.read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder, "override.txt")
        override.write_text("\n".join(triton))
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
        command += ["--python-version", python, "--python-platform", "linux", "--override", str(override)]
        command += [*(word for extra in EXTRAS for word in ("--extra", extra)), "-c", str(constraints)]
        done = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    versions = (line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return {canonicalize_name(name): version.split(";")[0].strip() for name, version in versions}


def faults(taken: dict[str, str], pinned: dict[str, list[str]]) -> list[str]:
    """What an install takes without a pin, and pins that nothing takes."""
    free = sorted(name for name in taken if name not in pinned and not name.startswith(CUDA))
    unused = sorted(name for name in pinned if name not in taken)
    return [*(f"{name} {taken[name]} has no pin" for name in free), *(f"{name} is pinned, not used" for name in unused)]


def main(pythons: Sequence[str] = PYTHONS) -> int:
    if shutil.which("uv") is None:
        sys.exit("no uv: pip install uv")
    failed = False
    for python in pythons:
        try:
            said = faults(resolved(python, CONSTRAINTS), pins(CONSTRAINTS.read_text().splitlines(), python))
        except RuntimeError as error:
            said = [str(error)]
        failed |= bool(said)
        print(f"Python {python}: {'; '.join(said) or 'resolved, each package pinned'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
