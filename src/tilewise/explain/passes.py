"""Passes over memory: what the operators that a PyTorch call runs read and write, counted while it runs.

Eager PyTorch runs one kernel for each operator, and each kernel reads its operands from memory and writes its result
there. On the device "meta" nothing is computed, so that any size can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Pass(NamedTuple):
    """An operator by name, and the bytes that it reads and writes: each tensor once, as far as it has memory."""

    name: str
    read: int
    written: int

    @property
    def bytes(self) -> int:
        """Both."""
        return self.read + self.written


def passes(call: Callable[[], object]) -> list[Pass]:
    """The operators of a call, forward and, where it asks for gradients, backward, without those that only look at a
    tensor in another way, or make one without writing it.
    """
    counted = _Counting()
    with counted:
        call()
    return counted.found


def moved(steps: Iterable[Pass]) -> int:
    """Bytes of all of them."""
    return sum(step.bytes for step in steps)


def size(*tensors: torch.Tensor) -> int:
    """Bytes of tensors; an expanded one has no more than its memory."""
    return sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)


def table(steps: Sequence[Pass], unit: int) -> str:
    """Each pass as a line, in multiples of `unit` bytes, and their sum."""
    lines = [f"{'':<28}{'read':>8}{'written':>9}"]
    lines += [f"{step.name:<28}{step.read / unit:>8.2f}{step.written / unit:>9.2f}" for step in steps]
    read, written = (sum(getattr(step, name) for step in steps) / unit for name in ("read", "written"))
    return "\n".join([*lines, f"{len(steps):>3} {'passes':<24}{read:>8.2f}{written:>9.2f}"])


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Pass] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs or {}))
        made = _tensors(results)
        name = func.overloadpacket.__name__
        looks = bool(made) and not func._schema.is_mutable and all(_shares(x, given) for x in made)
        if not looks and not name.startswith("empty") and (made or given):
            self.found.append(Pass(name, size(*given), size(*made)))
        return results


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a nest of arguments, each once."""
    return list({id(x): x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}.values())


def _shares(x: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor has another one's memory."""
    return any(x.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)
