"""Parts of an engine that raise once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from tilewise.engine import Engine, forward, runner
from tilewise.engine.text import Text
from tilewise.ops.attention.planned import AttentionPlan
from tilewise.ops.qkv_prologue import QKVPrologue

ERRORS: tuple[type[BaseException], ...] = (RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt)
# name: what raises, and before which of its calls
FAULTS: dict[str, tuple[Callable[[Engine], Any], str, int]] = {
    "first layer": (lambda engine: QKVPrologue, "run", 1),
    "first layer's attention": (lambda engine: forward, "plan", 1),
    "last layer": (lambda engine: AttentionPlan, "run", 2),
    "logits": (lambda engine: engine.decoder, "logits", 1),
    "sampling": (lambda engine: runner, "choose", 1),
    "send": (lambda engine: runner, "send_lists", 1),
    "seat": (lambda engine: engine.runner, "seat", 1),
    "parameters": (lambda engine: engine.runner._params, "of", 1),
    "results on their way": (lambda engine: engine.runner, "_received", 1),
    "wait": (lambda engine: runner.Step, "wait", 1),
    "take": (lambda engine: engine, "_take", 1),
    "text": (lambda engine: Text, "push", 1),
    "second text": (lambda engine: Text, "push", 2),
    "end of a text": (lambda engine: Text, "end", 1),
    "end": (lambda engine: engine.scheduler, "end", 1),
    "fits": (lambda engine: engine.pages, "fits", 1),
    "second fit": (lambda engine: engine.pages, "fits", 2),
    "grow": (lambda engine: engine.pages, "grow", 1),
    "second grow": (lambda engine: engine.pages, "grow", 2),
    "start": (lambda engine: engine.pages, "start", 1),
    "matched": (lambda engine: engine.pages, "matched", 1),
    "remember": (lambda engine: engine.pages, "remember", 1),
}


@dataclass
class Fault:
    """Whether it came to that."""

    raised: bool = False


@contextlib.contextmanager
def failing(engine: Engine, where: str, error: type[BaseException]) -> Iterator[Fault]:
    """A part of an engine raises, once."""
    owner, name, calls = FAULTS[where][0](engine), *FAULTS[where][1:]
    function, fault, left = getattr(owner, name), Fault(), [calls]

    def raising(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            fault.raised = True
            raise error(f"at {where}")
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, raising):
        yield fault
