"""Whether the assembler made of a Hopper kernel what it says, and a newer assembler where it did not.

ptxas 12.8, which Triton 3.6 brings for Hopper, computes at times the addresses of a loop's products from a register
that it has not set: products of what lies elsewhere, or an illegal access. ptxas 12.9, which the same package brings
for Blackwell, has not been seen to. What was found sound is noted in the cache folder by its bytes.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import pathlib
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

from tilewise.core.cache_folder import cache_folder, replace
from tilewise.core.errors import InputError
from tilewise.ops import uniform_registers
from tilewise.ops.uniform_registers import read_unset

_FOLDER = "sound-1"


def mended(compiled: Any) -> list[str]:
    """Assemble a compiled kernel anew where its products do not know where their operands are.

    Returns:
        The products that are wrong whichever assembler is taken, none for a kernel that is right.
    """
    if "wgmma" not in compiled.asm.get("ptx", ""):
        return []
    unset = _unset(compiled.asm["cubin"])
    if unset:
        binary = _assembled(compiled.asm["ptx"], compiled.metadata)
        if binary is not None and not _unset(binary):
            compiled.asm["cubin"] = compiled.kernel = binary
            compiled.module = compiled.function = compiled._run = None  # what was loaded, if it was
            return []
    return unset


def _unset(cubin: bytes) -> list[str]:
    """The products at addresses that are not set, told anew only of binaries that are not known to have none."""
    try:
        note = cache_folder(_FOLDER) / hashlib.sha256(_check() + cubin).hexdigest()
        if note.exists():
            return []
    except (OSError, InputError):  # an unusable folder is an error where something must be kept there
        note = None
    try:
        found = read_unset(inspected(cubin, "nvdisasm", "-c"))
    except (OSError, subprocess.CalledProcessError) as problem:
        _warn(str(problem))
        return []
    if not found and note is not None:
        _note(note)
    return found


@functools.cache
def _check() -> bytes:
    """What says that a binary is sound."""
    return inspect.getsource(uniform_registers).encode()


def _note(path: pathlib.Path) -> None:
    try:
        replace(path, "")
    except OSError:  # read-only or full: looked at again in the next process
        return


@functools.cache
def _warn(problem: str) -> None:
    warnings.warn(
        f"tilewise cannot look for the assembler's known fault in kernels for Hopper ({problem}): Triton's package "
        "from PyPI has nvdisasm",
        RuntimeWarning,
        stacklevel=2,
    )


def _assembled(ptx: str, metadata: Any) -> bytes | None:
    """By the newer assembler of Triton's package, with the options that the other had; None where it is not there."""
    options = [] if metadata.enable_fp_fusion else ["--fmad=false"]
    options += (getattr(metadata, "ptx_options", None) or "").split()
    with tempfile.TemporaryDirectory() as folder:
        source, binary = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_text(ptx)
        try:
            _run("ptxas-blackwell", ["-lineinfo", *options, "--gpu-name=sm_90a", str(source), "-o", str(binary)])
        except (OSError, subprocess.CalledProcessError):
            return None
        return binary.read_bytes()


@functools.lru_cache(maxsize=64)
def inspected(cubin: bytes, tool: str, option: str) -> str:
    """What one of the binary tools that come with Triton prints about a binary; OSError where the tool is missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return _run(tool, [option, str(path)])


def _run(tool: str, arguments: Sequence[str]) -> str:
    import triton

    path = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
