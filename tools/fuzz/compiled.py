"""Cases inside a region of torch.compile: attention, and whatever stands beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tilewise.core import errors
from tools.fuzz import fused, pages
from tools.fuzz import placed as places
from tools.fuzz.attention import plain_call, problem, with_gradients
from tools.fuzz.case import Case, Tensors
from tools.fuzz.draw import Draw
from tools.fuzz.formulas import formula

LAYERS: tuple[Callable[[Draw], Case], ...] = (
    fused.norm, fused.softmax, fused.glu, fused.rope, fused.cross_entropy, fused.linear_cross_entropy, fused.merge,
    pages.write, pages.copy,
)  # fmt: skip


def _region(run: Callable[..., Tensors], draw: Draw) -> Callable[..., Tensors]:
    """`run`, compiled anew and whole; on a CPU without a C++ compiler's seconds."""

    def compiled(*given: Any) -> Tensors:
        torch._dynamo.reset()
        region = torch.compile(run, backend="inductor" if draw.on_gpu else "aot_eager", fullgraph=True)
        try:
            found: Tensors = region(*given)
        except torch._dynamo.exc.Unsupported as error:
            raise _refusal(error) from error
        return found

    return compiled


def _refusal(error: Exception) -> Exception:
    """What was raised inside: the tracer wraps it where nothing in the region catches it."""
    found = re.search(r"raised exception (\w+)\('([^']*)", str(error))
    if found is None or not issubclass(getattr(errors, found[1], type(None)), errors.TilewiseError):
        return error
    return errors.UnsupportedError(found[2], got=found[1], expected="as without torch.compile", hint="see there")


def attention(draw: Draw) -> Case:
    """Of any layout."""
    dtype, sizes = draw.dtype(wide=False), places.heads(draw)
    layout = draw.kernel((places.dense, places.packed, places.paged))
    made = problem(draw, sizes, dtype, layout(draw, sizes, dtype), found=formula(draw, 0.7, 0.4))
    more = with_gradients(made) if layout is not places.paged and draw.kernel_chance(0.5) else {}
    return made.case(_region(plain_call, draw), **more)


def layers(draw: Draw) -> Case:
    """What stands beside it."""
    case = draw.kernel(LAYERS)(draw)
    return replace(case, library=_region(case.library, draw), repeats=False, text=f"compiled {case.text}")
