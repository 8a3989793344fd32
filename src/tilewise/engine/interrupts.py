"""Ctrl-C comes when an engine's bookkeeping is whole: while the model computes, or after."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Keeps SIGINT's handler waiting until the block ends, where it is called if the signal came.

    In threads that get no signals, and where Python does not handle SIGINT, it does nothing. Blocks may be nested: the
    outermost one decides.

    Example:
        >>> with Interrupts() as interrupts:  # here all or nothing happens
        ...     with interrupts.let_through():  # here Ctrl-C raises KeyboardInterrupt
        ...         pass
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._through = False
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Interrupts:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            try:
                signal.signal(signal.SIGINT, self._handle)
            except ValueError:  # of another thread than the main one, which alone runs handlers
                return self
            self._handler = handler
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """In this block the handler is called at once, the first time: what follows an exception is whole again."""
        self._through = True
        try:
            if self._came is not None:
                self._handle(*self._came)
            yield
        finally:
            self._through = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._through:
            self._through, self._came = False, None
            self._handler(number, frame)
        else:
            self._came = (number, frame)
