"""Digests of kernels and launches: blind to words, names and places, not to an instruction, an option or a grid."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise.testing.instructions import digest
from tilewise.testing.offline import Resources, compiling_for
from tools.same_code import digests

KERNEL = '''
import triton
import triton.language as tl


@triton.jit
def add_rows(x, y, n, BLOCK: tl.constexpr):
    """y += x."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, values + tl.load(y + offsets, mask=offsets < n), mask=offsets < n)
'''


def launched(folder: Path, text: str, name: str = "add_rows", grid: int = 4, **options: Any) -> Resources:
    """What a file's kernel compiles to, launched over 256 numbers."""
    path = folder / f"file_{digest([text])}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.zeros(256)
    with compiling_for(90) as kernels:
        getattr(module, name)[(grid,)](x, x.clone(), 250, BLOCK=64, **options)
    (found,) = kernels.resources()
    return found


def test_words_names_and_places_change_nothing(tmp_path: Path) -> None:
    first = launched(tmp_path, KERNEL)
    reworded = KERNEL.replace('"""y += x."""', "# adds\n\n").replace("values", "of_x").replace("add_rows", "sum_rows")
    (tmp_path / "elsewhere").mkdir()
    second = launched(tmp_path / "elsewhere", reworded, "sum_rows")
    assert (second.code, second.launch) == (first.code, first.launch)
    assert "add_rows" not in first.code
    assert str(tmp_path) not in first.code
    assert "ld.global" in first.code


@pytest.mark.parametrize(
    ("text", "options", "same"),
    [
        (KERNEL.replace("values +", "values -"), {}, "launch"),
        (KERNEL, {"num_warps": 2}, ""),
        (KERNEL, {"grid": 5}, "code"),
        (KERNEL.replace("mask=offsets < n)\n", "mask=offsets < n, other=1.0)\n", 1), {}, "launch"),
    ],
    ids=["an instruction", "a configuration", "a grid", "a fill value"],
)
def test_what_a_kernel_does_and_how_it_is_launched_shows(
    tmp_path: Path, text: str, options: dict[str, Any], same: str
) -> None:
    first, second = launched(tmp_path, KERNEL), launched(tmp_path, text, **options)
    assert (first.code == second.code) is (same == "code")
    assert (first.launch == second.launch) is (same == "launch")


def test_a_tensor_is_its_shape_strides_and_alignment(tmp_path: Path) -> None:
    first = launched(tmp_path, KERNEL)
    assert "torch.float32(256,)(1,)aligned" in first.launch
    assert digests([first]) == digests([first])
