"""Operands of tensor cores that are wider than what they multiply: Triton 3.6 and 3.9 make wrong numbers of them."""

from __future__ import annotations

import re

_OPERAND = re.compile(r"tensor<([0-9x]+)x\w+, #ttg\.dot_op<\{opIdx = (\d), parent = #\w+, kWidth = (\d+)\}>>")
_LANES = 4  # that share a row of an operand, each with `kWidth` numbers that follow each other


def too_wide(ttgir: str) -> list[str]:
    """The operands in Triton's GPU code whose lanes hold more numbers than the product's inner dimension has.

    The width follows the narrowest type that an operand was computed from, halved by each join.
    """
    found = []
    for match in _OPERAND.finditer(ttgir):
        dims = [int(n) for n in match[1].split("x")]
        inner = dims[-1] if match[2] == "0" else dims[-2]
        if _LANES * int(match[3]) > inner:
            found.append(match[0])
    return found
