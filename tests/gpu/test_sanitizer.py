"""CUDA's compute-sanitizer finds no access outside of memory, forward or backward."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.properties import Setting, run

SMALL = ("plain", "causal", "window", "document", "packed_causal", "bias_batch")
ERRORS = 9  # its exit code then


@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_memcheck_is_clean(impl: str) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    checked = [tool, "--tool", "memcheck", "--error-exitcode", str(ERRORS), sys.executable, "-m", __name__, impl]
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor an allocation, whose end the tool knows
    done = subprocess.run(checked, env={**os.environ, **alone}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


if __name__ == "__main__":
    for name in SMALL:
        run(Setting(sys.argv[1], torch.bfloat16, DEVICE), make_inputs(CASES[name], torch.bfloat16, DEVICE))
    torch.cuda.synchronize()
