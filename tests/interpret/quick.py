"""Triton's interpreter in half the time: what it works out at every operation is kept, and no result is another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Inside, triton.language is patched once and not at every call of a device function, types of blocks and shapes of
    tensors are made once, and no overflow is looked for: those checks only raise, and compiled kernels have none.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang, core))
        patch.setattr(interpreter, "_patch_attr", _patch_attr)
        patch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))
        _keep_types(patch, core, semantic)
        yield


def _patched_once(patch_lang: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    """The patch is the same each time: one for the modules that a function sees is enough."""
    import triton.language as tl

    done: set[int] = set()
    seen: set[int] = set()

    class Nothing:
        def restore(self) -> None:
            pass

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in seen:
            languages = {id(value) for value in fn.__globals__.values() if value is tl or value is core}
            if not languages <= done:
                patch_lang(fn)
                done.update(languages)
            seen.add(id(fn.__globals__))
        return Nothing()

    return patch_once


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's, which copies the arguments of every operation and checks them once more."""
    from triton.language.semantic import TritonSemantic

    semantic = TritonSemantic(builder)
    inner = getattr(member, "__wrapped__", member)

    def operation(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return inner(*arguments, **named)

    scope.set_attr(obj, name, operation)


def _by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a type, asked once for each: types have names, and some no hash."""
    known: dict[str, Any] = {}

    def of_type(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = function(type)
        return known[type.name]

    return of_type


def _keep_types(patch: pytest.MonkeyPatch, core: Any, semantic: Any) -> None:
    """One object for each type of a block, one shape for all tensors of a type, and nothing to do for equal shapes."""
    blocks: dict[Any, Any] = {}
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    make_alike = semantic.TritonSemantic.broadcast_impl_value

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (element_ty.name, getattr(element_ty, "const", None), sizes)
        if key not in blocks:
            blocks[key] = object.__new__(cls)
            make_block(blocks[key], element_ty, shape)
            blocks[key].sizes = sizes
        return blocks[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            make_tensor(self, handle, type)
            type._of_tensors = (self.shape, self.numel, self.dtype)
            return
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ()):
            return lhs, rhs
        return make_alike(self, lhs, rhs)

    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast)
    patch.setattr(core.block_type, "__new__", new_block, raising=False)
    patch.setattr(core.block_type, "__init__", lambda self, element_ty, shape: None)
    patch.setattr(core.tensor, "__init__", init_tensor)
