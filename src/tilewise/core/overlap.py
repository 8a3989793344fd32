"""Whether two tensors that are written to share memory: by pointers, sizes and strides, without a look at any value."""

from __future__ import annotations

import functools

import torch

from tilewise.core.errors import InputError
from tilewise.core.readback import being_traced


def check_apart(name: str, x: torch.Tensor, other: str, y: torch.Tensor) -> None:
    """Raise InputError if `x` and `y`, both written to, have an element in one place.

    Views of one tensor that lie beside or between each other pass. Of two whose strides differ, only a common first
    element is seen. While a region is compiled, and of tensors without memory, nothing is looked at.

    Args:
        name, other: of the two tensors, for messages.
        x, y: tensors of any shape and strides.

    Raises:
        InputError: what is written to one would be found in the other.

    Example:
        check_apart("v_pages", v_pages, "k_pages", k_pages)
    """
    if being_traced() or type(x) is not torch.Tensor or type(y) is not torch.Tensor or x.device.type == "meta":
        return
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or not x.numel() or not y.numel():
        return
    offset = y.data_ptr() - x.data_ptr()
    steps = tuple(stride * x.element_size() for stride in x.stride())
    same = steps == tuple(stride * y.element_size() for stride in y.stride())
    if offset == 0 or (same and _meet(offset, steps, tuple(x.shape), tuple(y.shape))):
        raise InputError(
            name,
            got=f"memory of {other}",
            expected="memory of its own",
            hint="views of one tensor may lie side by side, as pages[:, 0] and pages[:, 1] do",
        )


@functools.lru_cache(maxsize=1024)
def _meet(offset: int, steps: tuple[int, ...], shape_x: tuple[int, ...], shape_y: tuple[int, ...]) -> bool:
    """Whether places (a - b) of elements a of x and b of y, in bytes, are ever `offset` apart."""
    axes = sorted(zip(steps, shape_x, shape_y, strict=True), reverse=True)

    def reach(rest: int, n: int) -> bool:
        if n == len(axes):
            return rest == 0
        step, of_x, of_y = axes[n]
        if step == 0:
            return reach(rest, n + 1)
        # what the smaller steps add stays below one step, in a tensor whose elements lie apart
        return any(1 - of_y <= count < of_x and reach(rest - count * step, n + 1) for count in _near(rest, step))

    return reach(offset, 0)


def _near(rest: int, step: int) -> tuple[int, int]:
    return rest // step, rest // step + 1
