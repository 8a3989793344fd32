"""What PyTorch's operators move when each is a pass of its own over memory: counted as they run, one after another.

Every operator loads the tensors that it takes and stores those that it gives; views move nothing. On meta tensors
nothing is computed either, so that any size can be counted anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# what an operator is given and does not read, by the places of its arguments; of what nll_loss is given it reads one
# number a row
_NOT_READ = {
    _aten.nll_loss_forward.default: (0,),
    _aten.nll_loss_backward.default: (1,),
    _aten.copy_.default: (0,),
    _aten.zero_.default: (0,),
    _aten.fill_.Scalar: (0,),
    **{like.default: (0,) for like in (_aten.zeros_like, _aten.ones_like)},
}


@dataclass(frozen=True)
class Moved:
    """Passes over memory (`operators`), bytes loaded and stored, and `operations`: one for each number that an operator
    takes or gives, whichever are more.
    """

    operators: int
    loads: int
    stores: int
    operations: int

    @property
    def bytes(self) -> int:
        """Bytes in either direction."""
        return self.loads + self.stores


def moved(function: Callable[[], object]) -> Moved:
    """Call a function once and count what its PyTorch operators move, those of a backward in it included.

    An operator counts as one pass over its tensors even if it reads them more than once, as softmax does, so counts are
    lower bounds. Numbers that a broadcast repeats count once.

    Args:
        function: without arguments. Its tensors may be on the meta device: then nothing is computed.

    Returns:
        A `Moved`: the number of operators, the bytes that they load and store, and their operations.

    Example:
        >>> from tilewise.explain.operators import moved
        >>> x = torch.zeros(1024)
        >>> counted = moved(lambda: x + x)
        >>> counted.operators, counted.loads, counted.stores
        (1, 8192, 4096)
    """
    with _Meter() as meter:
        function()
    return Moved(meter.operators, meter.loads, meter.stores, meter.operations)


class _Meter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.loads = self.stores = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            unread = _NOT_READ.get(func, ())
            taken = _tensors([x for n, x in enumerate(args) if n not in unread] + list((kwargs or {}).values()))
            given = _tensors(found)
            self.operators += 1
            self.loads += sum(map(_bytes, taken))
            self.stores += sum(map(_bytes, given))
            self.operations += max((x.numel() for x in (*taken, *given)), default=0)
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _bytes(x: torch.Tensor) -> int:
    """Of the numbers that are in memory."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return math.prod(sizes) * x.element_size() if x.numel() else 0
