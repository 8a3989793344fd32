"""What a launch is, as digests: a compiled kernel's instructions, and how the host launches it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_NO_INSTRUCTION = re.compile(r"//.*|^\s*\.(loc|file)\b.*|^\$L__(tmp|func_begin|func_end)\d+:", re.MULTILINE)
_LINE_TABLES = re.compile(r"^\s*\.section\s+\.debug", re.MULTILINE)
_OPTIONS = (
    "num_warps", "num_ctas", "maxnreg", "enable_fp_fusion", "shared", "tmem_size", "global_scratch_size",
    "launch_pdl", "launch_cooperative_grid", "ptx_options",
)  # fmt: skip


def digest(parts: Iterable[str]) -> str:
    """Twelve hexadecimal digits over texts in order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def instructions(kernel: Any) -> str:
    """A compiled kernel's PTX without its name, comments and line tables, and what else the assembler is told.

    Args:
        kernel: what Triton compiled for an NVIDIA GPU.
    """
    ptx = _LINE_TABLES.split(kernel.asm["ptx"], maxsplit=1)[0].replace(kernel.metadata.name, "kernel")
    lines = (line.strip() for line in _NO_INSTRUCTION.sub("", ptx).splitlines())
    options = [f"{name}={getattr(kernel.metadata, name, None)}" for name in _OPTIONS]
    return "\n".join([*options, *filter(None, lines)])


def launch(grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """A launch as text: its grid, its arguments in order, and the options by name. Of a tensor dtype, shape, strides
    and alignment count.
    """
    assert not callable(grid), "a grid is a tuple of numbers"
    named = [f"{name}={_value(value)}" for name, value in sorted(options.items())]
    return ";".join([_value(tuple(grid)), *map(_value, arguments), *named])


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{'aligned' * (value.data_ptr() % 16 == 0)}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_value, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _value([getattr(value, field.name) for field in dataclasses.fields(value)])
    if hasattr(value, "arg_names"):  # a function of Triton's, whose instructions are the kernel's
        return "function"
    text = repr(value)
    assert " at 0x" not in text, f"{text} says nothing of what it holds"
    return text
