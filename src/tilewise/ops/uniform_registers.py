"""Whether a Hopper kernel's products know where their operands are, from its disassembly.

The assembler may compute an address that two loops share on the way into the first, and read it in the second where the
first did not run: a product of what lies elsewhere, or an illegal access. Addresses are in uniform registers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

REGISTERS = 64
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_SETS = re.compile(r"U(?!ISETP|PLOP3)|R2UR|S2UR|CS2UR|VOTEU|REDUX")
_WIDE = re.compile(r"U.*\.64|UIMAD\.WIDE")


@dataclass
class _Instruction:
    text: str
    sets: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    after: list[int] = field(default_factory=list)  # what may follow it

    def known_behind(self, before: set[int]) -> set[int]:
        """The registers that are set behind it, to what is made of others that were set before."""
        return before - self.sets if self.reads - before else before | self.sets


def read_unset(disassembly: str) -> list[str]:
    """The products whose addresses some way to them does not set, or makes of what is not set."""
    program = _program(disassembly)
    known: list[set[int] | None] = [None] * len(program)  # set on every way to an instruction
    waiting = [0]
    known[0] = set()
    while waiting:
        at = waiting.pop()
        before = known[at]
        assert before is not None
        for after in program[at].after:
            old = known[after]
            new = program[at].known_behind(before) & (set(range(REGISTERS)) if old is None else old)
            if new != old:
                known[after] = new
                waiting.append(after)
    reached = [(one, there) for one, there in zip(program, known, strict=True) if there is not None]
    return [one.text for one, there in reached if one.reads - there and "gdesc" in one.text]


def _program(disassembly: str) -> list[_Instruction]:
    found: list[tuple[str, str, str, str]] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(found)
        instruction = _INSTRUCTION.match(line)
        if instruction:
            found.append((instruction[1], instruction[2] or "", instruction[3], instruction[4]))
    program = [_Instruction(f"{at}: {name} {rest}", *_registers(name, rest)) for at, _, name, rest in found]
    for n, (_, predicate, name, rest) in enumerate(found):
        to = re.search(r"`\((\.L_\w+)\)", rest)
        ends = name.startswith(("BRX", "RET")) or (name in ("EXIT", "BRA") and not predicate and "P" not in rest[:3])
        if not ends and n + 1 < len(found):
            program[n].after.append(n + 1)
        if name.startswith("BRA") and to:
            program[n].after.append(labels[to[1]])
    # a table of branches leads to the labels that nothing else does
    led_to = {after for one in program for after in one.after}
    roles = [at for at in labels.values() if at < len(found) and at not in led_to]
    for n, (_, _, name, _) in enumerate(found):
        if name.startswith("BRX"):
            program[n].after.extend(roles)
    return program


def _registers(name: str, rest: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction sets, and those that it reads."""
    sets: set[int] = set()
    reads: set[int] = set()
    operands = [x.strip() for x in rest.split(",")]
    first = next((n for n, x in enumerate(operands) if not re.match(r"U?P[0-9T]", x)), 0)  # behind predicates
    for n, operand in enumerate(operands):
        for number in (int(x) for x in re.findall(r"\bUR(\d+)\b", operand)):
            if n == first and _SETS.match(name):
                sets |= {number, number + 1} if _WIDE.match(name) else {number}
            elif "gdesc" in operand:  # addresses of the left operand, where that has one, and of the right
                left = set() if re.match(r"R\d+", operands[1]) else {number, number + 1}
                reads |= left | {number + 2, number + 3}
            else:
                reads.add(number)
    return sets, reads
