"""Which tensors an operation is given: what has no memory of its own is refused, and what PyTorch records or transforms
takes another way than a launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as _modes
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad

from tilewise.core.dispatch import untraced
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.core.readback import being_traced, has_memory, unreadable, values_checked

_PLAIN = (torch.Tensor, torch.nn.Parameter)
TRANSFORMED = "tensors inside vmap, torch.func or forward mode"
_STAND_INS = "torch._subclasses"  # FakeTensor and FunctionalTensor, which operators know
_HINTS = {
    "DTensor": "pass x.to_local(), or wrap the call in torch.distributed.tensor.experimental.local_map",
    "AsyncCollectiveTensor": "pass x.wait()",
    "nested": "sequences of different lengths go through layout=tilewise.Packed(cu_seqlens), other rows as x.values()",
    "sparse": "pass x.to_dense()",
    "negated": "pass x.resolve_neg()",
}


def not_dense(x: Any) -> tuple[str, str] | None:
    """What x is in place of a dense tensor with memory of its own, and a hint; None for such a tensor."""
    kind = type(x)
    if not isinstance(x, torch.Tensor):
        return kind.__name__, "convert it with torch.as_tensor"
    if x.is_nested:  # of a subclass where it is jagged
        return "a nested tensor", _HINTS["nested"]
    if not has_memory(kind) and not kind.__module__.startswith(_STAND_INS):
        return f"a {kind.__name__}", _HINTS.get(kind.__name__, "pass the tensor that it wraps")
    if x.layout is not torch.strided:
        return f"a {x.layout} tensor", _HINTS["sparse"]
    if not torch.compiler.is_compiling() and x.is_neg():  # memory holds the numbers before the sign
        return "a tensor that is negated when it is read (the negative bit of x.conj().imag)", _HINTS["negated"]
    return None


def check_dense(name: str, x: Any, expected: str, hint: str | None = None) -> None:
    """Raise InputError unless x is a dense tensor with memory of its own; `hint` is for what is no tensor at all."""
    found = not_dense(x)
    if found is not None:
        got, own = found
        own = own if hint is None or isinstance(x, torch.Tensor) else hint
        raise InputError(name, got=got, expected=expected, hint=own)


def check_all_dense(tensors: dict[str, torch.Tensor]) -> None:
    """As `check_dense` of each."""
    for name, x in tensors.items():
        check_dense(name, x, "a dense tensor with memory of its own")


def as_int32(x: Any) -> Any:
    """An int64 index tensor, as `cumsum` gives it, in int32, converted on its device at each call; all else as it is.
    Where values are checked, one that needs more bits becomes the nearest int32, which is out of range as well.
    """
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.int64 or not_dense(x) is not None:
        return x
    if values_checked(x.device):
        x = x.clamp(-(2**31), 2**31 - 1)
    return x.to(torch.int32, memory_format=torch.contiguous_format)


# ways ----------------------------------------------------------------------------------------------------------------


def plain(tensors: Iterable[Any]) -> bool:
    """Whether all are plain dense tensors, or None, that nothing records and nothing transforms: what nearly every call
    is, and at the cost that every call can bear. What is not goes through `check_all_dense`, `transformed`, `recorded`.
    """
    if being_traced() or _modes() > 0 or peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    for x in tensors:
        if x is not None and (
            type(x) not in _PLAIN or x.layout is not torch.strided or x.is_nested or x.is_meta or x.is_neg()
        ):
            return False
    return True


@untraced
def transforming() -> bool:
    """Whether a transform of torch.func, batched gradients or forward mode are under way."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def transformed(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of them is seen by such a transform, which passes through PyTorch's own operations alone. Inside a
    compiled region nothing tells them apart: all are.
    """
    if not transforming():
        return False
    return torch.compiler.is_compiling() or any(x is not None and _is_transformed(x) for x in tensors)


def _is_transformed(x: torch.Tensor) -> bool:
    return is_functorch_wrapped_tensor(x) or has_tangent(x)


def batched(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of them is many tensors, as gradients are under is_grads_batched, which no transform tells of."""
    if torch.compiler.is_compiling():
        return False
    return any(x is not None and (is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)) for x in tensors)


def has_tangent(x: torch.Tensor) -> bool:
    """Whether x is a dual tensor."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def recorded(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether operators are kept, or looked at, in place of what they launch: inside torch.compile and torch.export,
    under a dispatch mode (make_fx, selective checkpointing), of fake tensors and of those on the meta device.
    """
    if being_traced() or _modes() > 0:
        return True
    return any(x is not None and (type(x) not in _PLAIN or x.is_meta) and _stands_in(x) for x in tensors)


def _stands_in(x: torch.Tensor) -> bool:
    return x.is_meta or type(x).__module__.startswith(_STAND_INS)


def hidden(x: torch.Tensor) -> bool:
    """Whether the values of x cannot be read now, nor what is computed of them."""
    if unreadable(x) or x.is_meta or transformed((x,)):
        return True
    return _modes() > 0 and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def refuse_batched(name: str, tensors: Iterable[Any]) -> None:
    """Raise UnsupportedError for index tensors that vmap sees, whose values cannot be read."""
    if not transforming() or torch.compiler.is_compiling():
        return
    for x in tensors:
        while isinstance(x, torch.Tensor) and is_functorch_wrapped_tensor(x):
            if is_batchedtensor(x):
                raise no_derivative(name, "a tensor that vmap has batched")
            x = get_unwrapped(x)


def refuse_transforms(operation: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raise UnsupportedError for tensors that a transform sees, where it would see nothing of the result."""
    if transformed(tensors):
        raise no_derivative(operation)


def no_derivative(operation: str, got: str = TRANSFORMED, *, second: bool = False) -> UnsupportedError:
    """What is raised where neither the operation nor PyTorch's own could do it: a transform, or a second derivative."""
    expected, hint = "plain tensors", "call it outside the transform, for one example at a time"
    if second:
        expected = "first derivatives"
        hint = "write this part in PyTorch's own operations where second ones are needed"
    return UnsupportedError(operation, got=got, expected=expected, hint=hint)
