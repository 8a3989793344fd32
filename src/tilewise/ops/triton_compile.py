"""Compiling a kernel before anything is launched: one that wants more memory than there is, or whose numbers are known
to be wrong, is compiled in another way or refused.

The compile tier sees that no configuration leads here; a formula is the caller's.
"""

from __future__ import annotations

import functools
from typing import Any

import triton

from tilewise.core.errors import UnsupportedError
from tilewise.ops.assembled import mended
from tilewise.ops.triton_operands import too_wide

_sound: dict[str, Any] = {}  # binaries that are right, by the hash of the kernel: each device has one of its own


def compiled_for(
    kernel: Any, grid: int, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles for these arguments, looked at, and the options that it was compiled with: fewer stages than
    were asked for where shared memory does not hold them. (None, options) from the interpreter.

    Raises UnsupportedError where no number of stages fits, or the code is known to be wrong.
    """
    compiled = kernel.run(*arguments, grid=(grid,), warmup=True, **options)
    if compiled is None:
        return None, options
    limit = shared_limit()
    while compiled.metadata.shared > limit and options["num_stages"] > 1:
        options = options | {"num_stages": options["num_stages"] - 1}
        compiled = kernel.run(*arguments, grid=(grid,), warmup=True, **options)
    if compiled.metadata.shared > limit:
        raise UnsupportedError(
            compiled.metadata.name,
            got=f"{compiled.metadata.shared} bytes of shared memory",
            expected=f"at most {limit}, which a block of this GPU has",
            hint="please report the call; tilewise.why(...) lists other implementations",
        )
    look_at(compiled)
    return compiled, options


def look_at(compiled: Any) -> None:
    """Mend a compiled kernel whose numbers are known to be wrong, or raise UnsupportedError, before it is launched."""
    if compiled.hash in _sound and _sound[compiled.hash] == compiled.asm.get("cubin"):
        return
    wide = too_wide(compiled.asm.get("ttgir", ""))
    if wide:
        raise _wrong(
            compiled, f"whose lanes hold more numbers than a product has: {wide[0]}", "multiplies each number once"
        )
    lost = mended(compiled)
    if lost:
        raise _wrong(compiled, f"with products at addresses that are not set: {lost[0]}", "says where its operands are")
    _sound[compiled.hash] = compiled.asm.get("cubin")


def _wrong(compiled: Any, what: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        compiled.metadata.name,
        got=f"code of Triton {triton.__version__} {what}",
        expected=f"code that {expected}",
        hint="please report the formula; tilewise.why(...) lists other implementations",
    )


def shared_limit() -> int:
    """Bytes of shared memory that a block of the current GPU may have."""
    return _shared_limit(triton.runtime.driver.active.get_current_device())


@functools.cache
def _shared_limit(device: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])
