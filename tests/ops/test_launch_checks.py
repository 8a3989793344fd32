"""A compiled kernel that is known to give wrong numbers is an error, whatever formula led to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.core.errors import UnsupportedError
from tilewise.ops.triton_launch import look_at

WIDE = "tensor<16x16xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 8}>>"


def compiled(text: str, name: str) -> Any:
    return SimpleNamespace(hash=name, asm={"ttgir": text}, metadata=SimpleNamespace(name="attention_fwd"))


def test_wide_operands_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"attention_fwd: got code of Triton .* whose lanes hold more"):
            look_at(compiled(WIDE, "of wide operands"))


def test_others_and_the_interpreter_pass() -> None:
    look_at(compiled(WIDE.replace("kWidth = 8", "kWidth = 4"), "of others"))
    look_at(None)
